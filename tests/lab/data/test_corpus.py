"""Statistics and order of a corpus, its fit to a model, and changes since a run started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from affine_attention.lab.data import check_same_data, check_vocabulary, prepare, train_tokenizer

from .texts import DOCUMENTS, write_text


@pytest.fixture
def files(tmp_path):
    return [write_text(tmp_path / f"{name}.txt", DOCUMENTS[i::3]) for i, name in enumerate("abc")]


def prepared(files, tokenizer, **changes):
    settings = {"sequence_length": 32, "heldout": 0.1, "cache": Path(files[0]).parent / "cache"} | changes
    return prepare(files, tokenizer=tokenizer, **settings)


def test_numbers(files, tokenizer):
    corpus = prepared(files, tokenizer)
    stats = corpus.stats
    assert stats["documents"] + stats["heldout_documents"] == 120
    assert stats["characters"] + stats["heldout_characters"] == sum(map(len, DOCUMENTS))
    assert stats["sequences"] == stats["tokens"] // 32
    assert corpus.epochs(2 * stats["sequences"]) == 2.0
    assert corpus.vocabulary_size == len(tokenizer) == 300
    assert not corpus.streaming
    told = corpus.describe(num_sequences=3 * stats["sequences"])
    for part in ("a.txt", f"{stats['tokens']:,} tokens", "3 epochs", "300", corpus.fingerprint):
        assert part in told
    assert json.loads(json.dumps(corpus.manifest)) == corpus.manifest


def test_the_order_is_that_of_the_seed(files, tokenizer):
    def order(corpus, *seed):
        dataset = corpus.train_dataset(50, *seed)
        return torch.stack([dataset[i]["input_ids"] for i in range(len(dataset))])

    corpus = prepared(files, tokenizer, seed=3)
    assert torch.equal(order(corpus), order(corpus, 3))
    assert not torch.equal(order(corpus), order(corpus, 4))
    assert len(corpus.heldout_dataset(2)) == 2
    for arguments in ((0,), (5, 0)):
        with pytest.raises(ValueError):
            corpus.train_dataset(*arguments, **({"ranks": 2} if len(arguments) == 2 else {}))


def test_a_model_must_have_every_id(files, tokenizer):
    corpus = prepared(files, tokenizer)
    assert corpus.largest_id == max(int(corpus.train.ids.max()), int(corpus.heldout.ids.max()))
    check_vocabulary(corpus, corpus.largest_id + 1)
    with pytest.raises(ValueError) as error:
        check_vocabulary(corpus, corpus.largest_id)
    assert f"token id {corpus.largest_id}" in str(error.value)
    assert "at least 300" in str(error.value)
    stream = prepared(files, tokenizer, streaming=True)
    with pytest.raises(ValueError):
        check_vocabulary(stream, 299)
    check_vocabulary(stream, 300)


def test_changes_are_listed(files, tokenizer):
    recorded = json.loads(json.dumps(prepared(files, tokenizer).manifest))
    check_same_data(recorded, prepared(files, tokenizer, seed=9))
    a, b, c = files

    def changes(*arguments, **settings):
        with pytest.raises(ValueError) as error:
            check_same_data(recorded, prepared(*arguments, **settings))
        return str(error.value)

    assert "c.txt was removed" in changes([a, b], tokenizer)
    assert "the order of the files changed" in changes([b, a, c], tokenizer)
    assert "sequence_length: 32 -> 16" in changes(files, tokenizer, sequence_length=16)
    assert "heldout: 0.1 -> 0.2" in changes(files, tokenizer, heldout=0.2)
    assert "the tokenizer changed" in changes(files, train_tokenizer(DOCUMENTS, 290))
    write_text(b, DOCUMENTS[:50])
    message = changes(files, tokenizer)
    assert "b.txt changed" in message
    assert "a.txt" not in message
    b.unlink()
    with pytest.raises(FileNotFoundError) as error:
        prepared(files, tokenizer)
    assert str(b) in str(error.value)
    assert "b.txt was removed" in changes([str(a.parent / "*.txt")], tokenizer)
