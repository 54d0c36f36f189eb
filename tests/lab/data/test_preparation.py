"""From files to a corpus: the split, the cache, the fingerprint, and every kind of bad data before the first step."""

from __future__ import annotations

import lzma
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from affine_attention.lab.data import prepare, read_documents, train_tokenizer
from affine_attention.lab.data.heldout import FractionSplit

from .texts import SHARED, make_documents, write_json_lines, write_text

DOCUMENTS = make_documents(120)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(DOCUMENTS, 300)


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt", DOCUMENTS)


def prepared(sources, tokenizer, tmp_path, **changes):
    settings = {"sequence_length": 32, "heldout": 0.1, "cache": tmp_path / "cache"} | changes
    return prepare(sources, tokenizer=tokenizer, **settings)


def text_of(corpus, dataset):
    return corpus.tokenizer.decode(torch.cat([example["input_ids"] for example in dataset]))


def test_the_parts_are_the_documents(text, tokenizer, tmp_path):
    corpus = prepared(text, tokenizer, tmp_path)
    held = [document for document in DOCUMENTS if FractionSplit(0.1).holds(document)]
    kept = [document for document in DOCUMENTS if not FractionSplit(0.1).holds(document)]
    for part, documents in ((corpus.train, kept), (corpus.heldout, held)):
        assert tokenizer.decode(part.ids) == "<|endoftext|>".join([*documents, ""])
        assert part.stats.documents == len(part.starts) == len(documents) > 3
    whole = corpus.stats["heldout_sequences"] * 32
    assert text_of(corpus, corpus.heldout_dataset()) == tokenizer.decode(corpus.heldout.ids[:whole])


@pytest.mark.parametrize("boundaries", [False, True])
def test_boundaries_are_a_setting_of_the_packing(text, tokenizer, tmp_path, boundaries):
    corpus = prepared(text, tokenizer, tmp_path, document_boundaries=boundaries)
    dataset = corpus.train_dataset(corpus.stats["sequences"])
    examples = [dataset[item] for item in range(len(dataset))]
    assert ("position_ids" in examples[3]) == boundaries
    assert examples[3]["input_ids"].shape == (32,)
    first_tokens = sum(int((example["labels"] == -100).sum()) for example in examples)
    begun = int((corpus.train.starts < 32 * len(dataset)).sum())
    assert first_tokens == (begun if boundaries else 0)
    assert ("position_ids" in corpus.heldout_dataset()[0]) == boundaries


def test_files_of_every_kind_give_the_same_corpus(tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    write_text(tmp_path / "data" / "a.txt", DOCUMENTS)
    (tmp_path / "data" / "b.txt.xz").write_bytes(lzma.compress((tmp_path / "data" / "a.txt").read_bytes()))
    write_json_lines(tmp_path / "data" / "c.jsonl", DOCUMENTS)
    parquet.write_table(pyarrow.table({"text": DOCUMENTS}), tmp_path / "data" / "d.parquet")
    corpora = [prepared(path, tokenizer, tmp_path) for path in sorted((tmp_path / "data").iterdir())]
    assert len({corpus.train.ids.tobytes() for corpus in corpora}) == 1
    assert len({corpus.fingerprint for corpus in corpora}) == 4


def test_a_tokenizer_without_an_end_of_text_gets_one(text, tokenizer, tmp_path):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    corpus = prepared(text, bare, tmp_path)
    assert corpus.tokenizer.eos_token == "<|endoftext|>"
    assert bare.eos_token is None  # the caller's own stays as it was
    assert corpus.fingerprint == prepared(text, tokenizer, tmp_path).fingerprint


def test_held_out_files_and_their_copies_are_not_trained_on(tokenizer, tmp_path):
    train = write_text(tmp_path / "train.txt", DOCUMENTS)
    held = write_json_lines(tmp_path / "held.jsonl", [*make_documents(5, 3), DOCUMENTS[4].replace(" ", "\n")])
    corpus = prepared(train, tokenizer, tmp_path, heldout=held)
    assert corpus.stats["heldout_documents"] == 6
    assert corpus.stats["documents"] == len(DOCUMENTS) - 1
    assert "Title 0 4\n" not in tokenizer.decode(corpus.train.ids)


def test_nothing_held_out(text, tokenizer, tmp_path):
    corpus = prepared(text, tokenizer, tmp_path, heldout=0)
    assert corpus.heldout_dataset() is None
    assert corpus.stats["documents"] == len(DOCUMENTS)


def test_a_trained_tokenizer_sees_the_training_part_alone(tmp_path):
    secret = [document.replace("Title", "QZXJKW" * 3) for document in DOCUMENTS]
    mixed = [s if FractionSplit(0.1).holds(s) else d for s, d in zip(secret, DOCUMENTS, strict=True)]
    assert any("QZXJKW" in document for document in mixed)
    corpus = prepared(write_text(tmp_path / "a.txt", mixed), None, tmp_path, vocabulary_size=400)
    assert not any("QZ" in token for token in corpus.tokenizer.get_vocab())
    assert any("Title" in token for token in corpus.tokenizer.get_vocab())
    assert "QZXJKW" in corpus.tokenizer.decode(corpus.heldout.ids)
    assert corpus.vocabulary_size <= 400


def test_the_cache_serves_every_packing_and_no_other_data(text, tokenizer, tmp_path):
    def folders():
        return {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}

    first = prepared(text, tokenizer, tmp_path)
    assert len(folders()) == 1
    for changes in ({"sequence_length": 16}, {"document_boundaries": True}):
        assert prepared(text, tokenizer, tmp_path, **changes).fingerprint != first.fingerprint
    assert len(folders()) == 1
    moved = tmp_path / "elsewhere.txt"
    moved.write_bytes(text.read_bytes())
    assert prepared(moved, tokenizer, tmp_path).fingerprint == first.fingerprint
    assert prepared(text, tokenizer, tmp_path, seed=4).fingerprint == first.fingerprint
    assert len(folders()) == 1
    for number, changes in enumerate(({"heldout": 0.2}, {"documents": "line"}, {"separator": "a"}), 2):
        assert prepared(text, tokenizer, tmp_path, **changes).fingerprint != first.fingerprint
        assert len(folders()) == number
    write_text(text, [*DOCUMENTS, "more"])
    assert prepared(text, tokenizer, tmp_path).fingerprint != first.fingerprint


PROGRAM = """
import sys
from affine_attention.lab.data import prepare
corpus = prepare(sys.argv[1], vocabulary_size=400, sequence_length=32, heldout=0.1, cache=sys.argv[2])
print(corpus.fingerprint, int(corpus.train.ids.sum()))
"""


def test_another_process_with_another_cache_agrees(text, tmp_path):
    """A tokenizer too is the same when it is trained again."""
    command = [sys.executable, "-c", PROGRAM, str(text), str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = prepared(text, None, tmp_path, vocabulary_size=400)
    assert done.stdout.split() == [here.fingerprint, str(int(here.train.ids.sum()))]
    assert done.stderr == ""  # no progress bar where there is no terminal


def prepare_and_tell(text, cache, answers):
    corpus = prepare(text, vocabulary_size=400, sequence_length=32, heldout=0.1, cache=cache)
    answers.put((corpus.fingerprint, int(corpus.train.ids.sum())))


def test_several_processes_at_once_agree(text, tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=prepare_and_tell, args=(text, tmp_path / "cache", answers)) for _ in range(3)]
    for process in processes:
        process.start()
    told = {answers.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    here = prepared(text, None, tmp_path, vocabulary_size=400, cache=tmp_path / "alone")
    assert told == {(here.fingerprint, int(here.train.ids.sum()))}
    left = sorted(path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock")
    assert [name.partition("-")[0] for name in left] == ["tokenizer", "tokens"]


def test_bad_data_is_named_before_anything_runs(tmp_path, tokenizer):
    def bad(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    good = write_text(tmp_path / "good.txt", DOCUMENTS)
    cases = [
        (bad("empty.txt", b""), {}, "empty.txt holds no text"),
        ([good, bad("blank.txt", b" \n\n\n")], {}, "blank.txt holds no text"),
        ([good, bad("latin.txt", b"ok\n\xe9t\xe9")], {}, "latin.txt: not UTF-8 at byte 3"),
        (bad("a.parquet", b"PAR1 cut"), {}, "a.parquet: not a whole parquet file"),
        (bad("a.jsonl", b'{"text": "a"}\n{"text": '), {}, "a.jsonl:2"),
        (bad("b.jsonl", b'{"content": "a"}\n'), {"text_column": "contents"}, "did you mean 'content'?"),
        (bad("a.pkl", b""), {}, "a.pkl"),
        (tmp_path / "gone.txt", {}, "gone.txt does not exist"),
        (write_text(tmp_path / "one.txt", DOCUMENTS[:1]), {}, "one document"),
        (good, {"heldout": 1e-7}, "holds out none of the 120 documents; heldout="),
        (good, {"sequence_length": 100_000}, "training part has"),
        (good, {"sequence_length": 1500}, "held-out part has"),
        (good, {"sequence_length": 1}, "sequence_length must be a whole number of at least 2, got 1"),
        (good, {"heldout": 1.0}, "heldout must be a share from 0 to below 1"),
        (good, {"heldout": tmp_path / "gone.txt"}, "gone.txt does not exist"),
        (good, {"heldout": good}, "no document is left to train on"),
        (good, {"documents": "page"}, "documents must be one of"),
        (good, {"tokenizer": None}, "set vocabulary_size"),
    ]
    for sources, changes, message in cases:
        with pytest.raises((ValueError, OSError)) as error:
            prepared(sources, changes.pop("tokenizer", tokenizer), tmp_path, **changes)
        assert message in str(error.value)
    left = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(left) == 1  # of those whose tokens are right and whose sequences are too long


def test_the_way_out_of_a_small_share_works(text, tokenizer, tmp_path):
    with pytest.raises(ValueError) as error:
        prepared(text, tokenizer, tmp_path, heldout=1e-7)
    share = float(str(error.value).partition("heldout=")[2].partition("heldout=")[2].split()[0])
    assert prepared(text, tokenizer, tmp_path, heldout=share, sequence_length=4).stats["heldout_documents"] >= 1


@pytest.mark.skipif(not (SHARED / "corpus").is_dir(), reason="the shared data is not here")
def test_the_shared_corpus():
    import tempfile

    source = SHARED / "corpus" / "openstax.val.txt"
    assert len(list(read_documents(source))) == 22
    with tempfile.TemporaryDirectory() as cache:
        corpus = prepare(source, tokenizer=SHARED / "teacher", sequence_length=256, heldout=0.1, cache=Path(cache))
        assert corpus.tokenizer.eos_token == "<|endoftext|>"
        assert corpus.stats["documents"] + corpus.stats["heldout_documents"] == 22
        assert corpus.vocabulary_size == 49152
        assert 50_000 < corpus.stats["tokens"] < 90_000


def test_a_change_in_the_middle_of_a_streamed_file_is_another_corpus(tokenizer, tmp_path):
    path = write_text(tmp_path / "large.txt", DOCUMENTS)
    text = path.read_text()
    text *= 3 * 2**20 // len(text)  # more than a megabyte from both ends to the middle
    prints = []
    for place in (None, 0, len(text) // 2, len(text) - 3):
        path.write_text(text if place is None else text[:place] + "#" + text[place + 1 :])
        corpus = prepared(path, tokenizer, tmp_path, streaming=True, heldout=0)
        prints.append(corpus.fingerprint)
    assert len(set(prints)) == 4
