"""A stream yields every document once per epoch, resumes exactly, and is shared by ranks."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import WorkerInfo

from affine_attention.lab.data import collate, prepare, train_tokenizer
from affine_attention.lab.data.heldout import FractionSplit

from .texts import make_documents, write_json_lines, write_text

LENGTH = 16
TRAIN = [make_documents(25, seed, words=12) for seed in range(3)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(make_documents(40), 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    for seed, documents in enumerate(TRAIN):
        write_json_lines(folder / f"train-{seed}.jsonl", documents)
    return folder


@pytest.fixture(autouse=True)
def library_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture(params=["hf:{}", "{}/*.jsonl"], ids=["library", "files"])
def corpus(request, folder, tokenizer, tmp_path):
    return make_corpus(request.param.format(folder), tokenizer, tmp_path)


def make_corpus(name, tokenizer, cache, **changes):
    settings = {"heldout": 0.1, "heldout_sequences": 3, "shuffle_window": 8, "document_boundaries": True} | changes
    return prepare(name, tokenizer=tokenizer, sequence_length=LENGTH, streaming=True, cache=cache, **settings)


def same(one, two):
    return all(torch.equal(one[key], two[key]) for key in one) and one.keys() == two.keys()


def test_an_epoch_holds_every_token_of_every_training_document(corpus, tokenizer):
    kept = [text for documents in TRAIN for text in documents if not FractionSplit(0.1).holds(text)]
    encoded = corpus.encoder.encode(kept)
    tokens = sum(map(len, encoded))
    epoch = tokens // LENGTH
    sequences = list(corpus.train_dataset(epoch, seed=1))
    assert len(sequences) == epoch
    assert {value.dtype for value in sequences[0].values()} == {torch.int64}
    seen = Counter(torch.cat([s["input_ids"] for s in sequences]).tolist())
    every = Counter(np.concatenate(encoded).tolist())
    assert not seen - every
    assert sum((every - seen).values()) == tokens - epoch * LENGTH < LENGTH
    # Documents begin where one ended, and nowhere else; one may end with the sequence before.
    eos = tokenizer.eos_token_id
    for s in sequences:
        begins = s["labels"] == -100
        assert torch.equal(begins[1:], s["input_ids"][:-1] == eos)
        assert (s["position_ids"][begins] == 0).all()


def test_held_out_documents_are_not_in_the_stream(corpus, tokenizer):
    held = [text for documents in TRAIN for text in documents if FractionSplit(0.1).holds(text)]
    assert len(held) > 3
    text = tokenizer.decode(torch.cat([s["input_ids"] for s in corpus.heldout_dataset()]))
    assert any(document in text for document in held)
    plain = list(corpus.train_dataset(300))  # several epochs
    trained = " ".join(tokenizer.decode(s["input_ids"]) for s in plain)
    for document in held:
        assert document.split("\n")[0] + "\n" not in trained
    assert corpus.stats["heldout_sequences"] >= 3
    assert len(corpus.heldout_dataset(3)) == 3
    assert corpus.stats["documents"] is None


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 9, 40, 119])
def test_a_stream_resumes_where_it_stopped(corpus, stop):
    whole = list(corpus.train_dataset(120, seed=5))
    dataset = corpus.train_dataset(120, seed=5)
    reading = iter(dataset)
    for _ in range(stop):
        next(reading)
    state = json.loads(json.dumps(dataset.state_dict()))
    resumed = corpus.train_dataset(120, seed=5)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == 120 - stop
    assert all(map(same, rest, whole[stop:]))
    # Twice in a row: from within the resumed one.
    if rest[3:]:
        again = corpus.train_dataset(120, seed=5)
        again.load_state_dict(state)
        reading = iter(again)
        for _ in range(3):
            next(reading)
        last = corpus.train_dataset(120, seed=5)
        last.load_state_dict(again.state_dict())
        assert all(map(same, last, whole[stop + 3 :]))
    assert all(map(same, resumed, whole))  # a new iteration starts at the beginning


def test_seed_and_epoch_change_the_order(corpus):
    orders = [[tuple(s["input_ids"].tolist()) for s in corpus.train_dataset(60, seed=seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert len(set(orders[0])) > 50


def test_a_step_takes_the_same_sequences_on_two_ranks(corpus):
    single = [batch["input_ids"] for batch in DataLoader(corpus.train_dataset(24), 8, collate_fn=collate)]
    parts = []
    for rank in range(2):
        shard = IterableDatasetShard(corpus.train_dataset(24), batch_size=4, num_processes=2, process_index=rank)
        parts.append([batch["input_ids"] for batch in DataLoader(shard, 4, collate_fn=collate)])
    for step, whole in enumerate(single):
        assert torch.equal(torch.cat([parts[0][step], parts[1][step]]), whole)


def test_ranks_can_share_the_documents(corpus):
    parts = [list(corpus.train_dataset(30, rank=rank, ranks=2)) for rank in range(2)]
    seen = [{tuple(s["input_ids"].tolist()) for s in part} for part in parts]
    assert not seen[0] & seen[1]
    with pytest.raises(ValueError) as error:
        corpus.train_dataset(30, rank=2, ranks=2)
    assert "rank" in str(error.value)


def test_several_workers_are_rejected(corpus, monkeypatch):
    worker = WorkerInfo(id=1, num_workers=2, seed=0, dataset=None)  # as the loader sets it in a worker
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", worker)
    with pytest.raises(ValueError) as error:
        next(iter(corpus.train_dataset(8)))
    assert "dataloader_num_workers" in str(error.value)


def test_what_cannot_be_streamed(folder, tokenizer, tmp_path):
    with pytest.raises(ValueError) as error:
        make_corpus(folder, None, tmp_path, vocabulary_size=300)
    assert "tokenizer cannot be trained on a stream" in str(error.value)
    with pytest.raises(ValueError) as error:
        make_corpus(f"hf:{folder}", tokenizer, tmp_path, text_column="txt")
    assert "did you mean 'text'?" in str(error.value)
    only = write_text(tmp_path / "only.txt", make_documents(1))
    corpus = make_corpus(only, tokenizer, tmp_path, heldout=[only])
    with pytest.raises(ValueError) as error:
        next(iter(corpus.train_dataset(4)))
    assert "no document to train on" in str(error.value)
