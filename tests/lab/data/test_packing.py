"""Packing uses every token once, its order depends only on the seed, and packed documents are independent."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import default_data_collator

from affine_attention.hf import student
from affine_attention.lab.data import collate
from affine_attention.lab.data.packing import IGNORED_LABEL, PackedDataset, as_example

lengths_of_documents = st.lists(st.integers(1, 30), min_size=1, max_size=30)


def tokens_of(lengths):
    """Documents whose tokens are all different, and where they start."""
    return np.arange(sum(lengths), dtype=np.uint16), np.cumsum([0, *lengths[:-1]])


@given(lengths=lengths_of_documents, size=st.integers(2, 20), epochs=st.integers(1, 3), seed=st.integers(0, 2**40))
def test_no_token_is_lost_or_repeated_in_an_epoch(lengths, size, epochs, seed):
    ids, starts = tokens_of(lengths)
    count = len(ids) // size
    if count == 0:
        with pytest.raises(ValueError) as error:
            PackedDataset(ids, starts, size)
        assert f"{len(ids)} tokens do not fill one sequence of {size}" in str(error.value)
        return
    dataset = PackedDataset(ids, starts, size, count * epochs, seed)
    assert len(dataset) == count * epochs
    for epoch in range(epochs):
        seen = torch.cat([dataset[i]["input_ids"] for i in range(epoch * count, (epoch + 1) * count)])
        assert seen.sort().values.tolist() == list(range(count * size))


@given(lengths=lengths_of_documents, size=st.integers(2, 20))
def test_positions_restart_and_first_tokens_are_ignored_labels(lengths, size):
    ids, starts = tokens_of(lengths)
    if len(ids) < size:
        return
    dataset = PackedDataset(ids, starts, size)
    for item in range(len(dataset)):
        example = dataset[item]
        expected_labels, expected_positions, position = [], [], -1
        for token in range(item * size, (item + 1) * size):
            begins = token in starts
            position = 0 if begins else position + 1
            expected_positions.append(position)
            expected_labels.append(IGNORED_LABEL if begins else token)
        assert example["position_ids"].tolist() == expected_positions
        assert example["labels"].tolist() == expected_labels
        assert example["input_ids"].tolist() == list(range(item * size, (item + 1) * size))


def test_every_epoch_and_seed_has_its_own_order():
    ids = np.arange(400, dtype=np.uint16)
    orders = {
        tuple(PackedDataset(ids, None, 4, 300, seed).block(item) for item in range(start, start + 100))
        for seed in (0, 1)
        for start in (0, 100, 200)
    }
    assert len(orders) == 6
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert [PackedDataset(ids, None, 4).block(item) for item in range(100)] == list(range(100))


def test_the_order_of_a_seed_never_changes():
    dataset = PackedDataset(np.arange(40), None, 4, 20, seed=7)
    first, second = (
        [0, 1, 5, 7, 6, 9, 4, 3, 2, 8],
        [9, 8, 5, 6, 2, 3, 7, 0, 1, 4],
    )  # with another order, old runs could not resume
    assert [dataset.block(item) for item in range(20)] == first + second


@pytest.mark.parametrize("size", [8, 4, 2, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_takes_the_same_sequences_however_it_is_split(size, ranks):
    """As accelerate distributes batches: a step is `accumulation` batches of `size` on each rank."""
    global_batch, steps = 8, 5
    dataset = PackedDataset(np.arange(120, dtype=np.uint16), None, 4, global_batch * steps, seed=3)
    expected = [{int(dataset[s * global_batch + i]["input_ids"][0]) for i in range(global_batch)} for s in range(steps)]
    accumulation, rest = divmod(global_batch, size * ranks)
    if rest:
        return
    found = [set() for _ in range(steps)]
    for rank in range(ranks):
        batches = BatchSampler(SequentialSampler(dataset), size, drop_last=False)
        shard = BatchSamplerShard(batches, num_processes=ranks, process_index=rank)
        for number, batch in enumerate(DataLoader(dataset, batch_sampler=shard, collate_fn=collate)):
            found[number // accumulation] |= set(batch["input_ids"][:, 0].tolist())
    assert found == expected
    assert len(expected[0]) == global_batch


def test_examples_fit_the_collators():
    dataset = PackedDataset(np.arange(40, dtype=np.uint16), np.array([0, 7, 9]), 10)
    examples = [dataset[i] for i in range(3)]
    assert {value.dtype for value in examples[0].values()} == {torch.int64}
    batch = collate(examples)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].shape == (3, 10)
    for key, value in default_data_collator(examples).items():
        assert torch.equal(value, batch[key])
    assert dataset[-1]["input_ids"].tolist() == dataset[3]["input_ids"].tolist()
    with pytest.raises(IndexError):
        dataset[4]


@pytest.mark.parametrize("mechanism", ["affine", "softmax", "affine_gated", "sink"])
def test_a_packed_document_has_the_logits_of_the_single_document(mechanism):
    torch.manual_seed(0)
    model = student("llama-1m", mechanism, vocab_size=64, num_hidden_layers=2).eval()
    for name, value in model.named_buffers():
        if name.endswith("running_alpha"):
            value.fill_(0.3)
    lengths = [5, 1, 9, 12]
    documents = [torch.randint(0, 64, (length,)) for length in lengths]
    starts = np.cumsum([0, *lengths[:-1]])
    example = as_example(torch.cat(documents).numpy(), starts)
    batch = collate([example, example])
    with torch.no_grad():
        packed = model(**batch).logits[1]
        plain = model(input_ids=batch["input_ids"]).logits[1]
        for start, document in zip(starts, documents, strict=True):
            alone = model(input_ids=document[None]).logits[0]
            torch.testing.assert_close(packed[start : start + len(document)], alone, atol=1e-5, rtol=1e-5)
    assert (plain[starts[2] :] - packed[starts[2] :]).abs().max() > 1e-3  # without boundaries they see each other


def test_the_loss_of_packed_documents_is_that_of_the_documents():
    torch.manual_seed(0)
    model = student("llama-1m", "affine", vocab_size=64, num_hidden_layers=2).eval()
    documents = [torch.randint(0, 64, (length,)) for length in (7, 4, 9)]
    example = as_example(torch.cat(documents).numpy(), [0, 7, 11])
    with torch.no_grad():
        packed = model(**collate([example])).loss
        losses = [model(input_ids=d[None], labels=d[None]).loss * (len(d) - 1) for d in documents]
    torch.testing.assert_close(packed, sum(losses) / (6 + 3 + 8))


def test_a_loaders_worker_opens_the_files_itself(tmp_path):
    ids, starts = tokens_of([700, 300, 24000])
    for name, values in (("ids", ids), ("starts", starts.astype("<i8"))):
        values.tofile(tmp_path / name)
    mapped = PackedDataset(
        np.memmap(tmp_path / "ids", "<u2", "r"), np.memmap(tmp_path / "starts", "<i8", "r"), 50, 9, 1
    )
    sent = pickle.dumps(mapped)
    assert len(sent) < 1000
    again, held = pickle.loads(sent), pickle.loads(pickle.dumps(PackedDataset(ids, starts, 50, 9, 1)))
    part = PackedDataset(mapped.ids[50:], None, 50)
    assert torch.equal(pickle.loads(pickle.dumps(part))[0]["input_ids"], part[0]["input_ids"])
    for item in range(9):
        for key, value in mapped[item].items():
            assert torch.equal(again[item][key], value)
            assert torch.equal(held[item][key], value)


@settings(max_examples=20)
@given(count=st.integers(1, 50))
def test_an_order_is_kept_when_there_are_more_sequences(count):
    ids = np.arange(200, dtype=np.uint16)
    short, long = (PackedDataset(ids, None, 4, n, seed=1) for n in (count, 150))
    assert [short.block(i) for i in range(count)] == [long.block(i) for i in range(count)]
