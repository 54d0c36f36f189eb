"""Tokenizers load from wherever they are, train the same twice, and encode documents as they would alone."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from affine_attention.lab.data import load_tokenizer, train_tokenizer
from affine_attention.lab.data import tokenizer as module
from affine_attention.lab.data.tokenizer import SEPARATOR, DocumentEncoder, batched

from .texts import SHARED, make_documents

DOCUMENTS = make_documents(60)


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(DOCUMENTS, 320)


def test_a_trained_tokenizer_keeps_every_text(trained):
    assert len(trained) == 320
    for text in ("The river\nstone", "日本 é \x00 🙂", "  spaces  "):
        assert trained.decode(trained(text)["input_ids"]) == text
    assert trained.eos_token == "<|endoftext|>"


def test_training_twice_gives_the_same_tokenizer(trained):
    again = train_tokenizer(iter(DOCUMENTS), 320)  # test_preparation.py does so in other processes
    assert again.backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()


def test_a_tokenizer_is_found_by_folder_file_and_bare_file(trained, tmp_path):
    trained.save_pretrained(tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.json").write_text(trained.backend_tokenizer.to_str())
    for place in (tmp_path / "whole", tmp_path / "bare", tmp_path / "bare" / "tokenizer.json"):
        loaded = load_tokenizer(place)
        assert loaded(DOCUMENTS[0])["input_ids"] == trained(DOCUMENTS[0])["input_ids"]
        assert DocumentEncoder(loaded).fingerprint() == DocumentEncoder(trained).fingerprint()


def test_what_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    (tmp_path / "a.pkl").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "tokenizer.json", tmp_path / "a.pkl", tmp_path / "empty"):
        with pytest.raises(ValueError) as error:
            load_tokenizer(place)
        assert str(place) in str(error.value)


@pytest.mark.parametrize("size", [None, 256, 0, True, 300.0])
def test_a_vocabulary_that_cannot_be_trained(size):
    with pytest.raises((ValueError, TypeError)) as error:
        train_tokenizer(DOCUMENTS, size)
    assert "vocabulary_size" in str(error.value)


def test_documents_are_encoded_as_each_alone(trained):
    encoder = DocumentEncoder(trained)
    encoded = [ids for batch in encoder.encode_all(DOCUMENTS) for ids in batch]
    for text, ids in zip(DOCUMENTS, encoded, strict=True):
        assert ids.dtype == np.uint16
        assert ids.tolist() == [*trained(text)["input_ids"], trained.eos_token_id]


def test_very_long_documents_are_encoded_in_parts(trained, monkeypatch):
    encoder = DocumentEncoder(trained)
    text = "\n".join(DOCUMENTS)
    (whole,) = encoder.encode([text])
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 500)
    pieces = module._pieces(text)
    assert len(pieces) > 3
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 500
    first, second = encoder.encode([text, DOCUMENTS[0]])
    assert first.tolist() == whole.tolist()
    assert second.tolist() == [*trained(DOCUMENTS[0])["input_ids"], trained.eos_token_id]
    assert "".join(module._pieces("x" * 1234)) == "x" * 1234


def test_batches_hold_every_document_once():
    batches = list(batched(iter(DOCUMENTS), 1000))
    assert [text for batch in batches for text in batch] == DOCUMENTS
    assert len(batches) > 3
    assert all(sum(map(len, batch[:-1])) < 1000 for batch in batches)


def test_truncation_and_padding_of_a_file_are_not_followed(trained):
    backend = Tokenizer.from_str(trained.backend_tokenizer.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    encoder = DocumentEncoder(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>"))
    plain = DocumentEncoder(trained)
    assert [ids.tolist() for ids in encoder.encode(DOCUMENTS)] == [ids.tolist() for ids in plain.encode(DOCUMENTS)]


def word_tokenizer(special: dict[str, int], **names: str) -> PreTrainedTokenizerFast:
    vocabulary = {"?": 0, "river": 1, "stone": 2} | special
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def test_the_separator_is_the_end_of_text_or_named():
    names = {"<|endoftext|>": 70000, "<x>": 4}
    assert DocumentEncoder(word_tokenizer(names)).encode(["stone river"])[0].tolist() == [2, 1, 70000]
    assert DocumentEncoder(word_tokenizer(names)).dtype == np.uint32
    assert DocumentEncoder(word_tokenizer(names, eos_token="<x>")).tail == [4]
    assert DocumentEncoder(word_tokenizer(names), "<x>").tail == [4]
    with pytest.raises(ValueError) as error:
        DocumentEncoder(word_tokenizer(names), "<y>")
    assert "'<y>'" in str(error.value)
    with pytest.raises(ValueError) as error:
        DocumentEncoder(word_tokenizer({"<x>": 4}))
    assert "separator=" in str(error.value)


def test_a_tokenizer_that_starts_texts_with_a_token_does_so_for_documents():
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer({"<s>": 3, "</s>": 4}, bos_token="<s>", eos_token="</s>")
    assert DocumentEncoder(tokenizer).encode(["stone"])[0].tolist() == [2, 4]
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    assert DocumentEncoder(tokenizer).encode(["stone"])[0].tolist() == [3, 2, 4]


def test_the_fingerprint_changes_with_what_comes_out(trained):
    other = train_tokenizer(DOCUMENTS, 319)
    prints = {DocumentEncoder(trained).fingerprint(), DocumentEncoder(other).fingerprint()}
    prints.add(DocumentEncoder(trained, separator="a").fingerprint())
    assert len(prints) == 3


@pytest.mark.skipif(not (SHARED / "teacher").is_dir(), reason="the shared data is not here")
def test_a_published_tokenizer_by_its_bare_file():
    encoder = DocumentEncoder(load_tokenizer(SHARED / "teacher"))
    assert encoder.largest_id == 49151
    assert encoder.separator == "<|endoftext|>"
    (ids,) = encoder.encode(["The river."])
    assert encoder.tokenizer.decode(ids) == "The river.<|endoftext|>"


def test_the_text_of_a_special_token_is_text_unless_asked():
    tokenizer = train_tokenizer(["some words to learn from"] * 9, 300)
    text = f"before {SEPARATOR} after"
    plain, special = DocumentEncoder(tokenizer), DocumentEncoder(tokenizer, special_tokens=True)
    end = tokenizer.convert_tokens_to_ids(SEPARATOR)
    assert plain.encode([text])[0].tolist().count(end) == 1, "the separator at the end alone"
    assert special.encode([text])[0].tolist().count(end) == 2
    assert tokenizer.decode(plain.encode([text])[0][:-1]) == text
    assert plain.fingerprint() != special.fingerprint()


def test_a_long_document_is_encoded_in_pieces(monkeypatch):
    tokenizer = train_tokenizer(["some words to learn from"] * 9, 300)
    text = "some words\n" * 500
    whole = DocumentEncoder(tokenizer).encode([text, "short"])
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 1000)
    encoder, most = DocumentEncoder(tokenizer), []
    encode = encoder._encode
    monkeypatch.setattr(encoder, "_encode", lambda texts: most.append(sum(map(len, texts))) or encode(texts))
    pieces = encoder.encode([text, "short"])
    assert [ids.tolist() for ids in pieces] == [ids.tolist() for ids in whole]
    assert max(most) <= 2000


@pytest.mark.parametrize("size", [2**24 + 1, 10**9])
def test_a_vocabulary_has_a_largest_size(size):
    with pytest.raises(ValueError, match="must be at most"):
        train_tokenizer(["a"], size)


def test_a_long_document_trains_the_same_tokenizer_in_pieces(monkeypatch):
    text = "".join(f"some words of line {n % 7}\n" for n in range(300))
    whole = train_tokenizer([text], 300)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 500)
    sizes = []

    class Recording:
        """The library's own type has no subclasses."""

        def __init__(self, model):
            self.__dict__["inner"] = Tokenizer(model)

        def __setattr__(self, name, value):
            setattr(self.inner, name, value)

        def train_from_iterator(self, texts, trainer):
            texts = list(texts)
            sizes.extend(map(len, texts))
            self.inner.train_from_iterator(texts, trainer)

    monkeypatch.setattr(tokenizers, "Tokenizer", Recording)
    monkeypatch.setattr(module, "PreTrainedTokenizerFast", lambda tokenizer_object, **_: tokenizer_object.inner)
    assert train_tokenizer([text], 300).get_vocab() == whole.get_vocab()
    assert max(sizes) <= 500, "the library needs about a hundred bytes for each character"
