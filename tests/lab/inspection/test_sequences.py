"""Sequences for inspection from files, documents and ids, and notes about what is missing."""

from __future__ import annotations

import pytest
import torch

from affine_attention.lab.data import train_tokenizer
from affine_attention.lab.data.packing import PackedDataset
from affine_attention.lab.inspection.sequences import find_sequences
from affine_attention.lab.recipe import Recipe

DOCUMENTS = [f"Document {n}: " + "one word after the other, " * 5 for n in range(6)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(DOCUMENTS, 280)


def ids_of(tokenizer, documents):
    return [i for text in documents for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]


def test_documents_are_concatenated(tokenizer):
    found = find_sequences(DOCUMENTS, tokenizer, 4, 30)
    flat = torch.cat([each["input_ids"][0] for each in found.inputs]).tolist()
    assert flat == ids_of(tokenizer, DOCUMENTS)[:120]
    assert all("position_ids" not in each for each in found.inputs)
    assert found.missing == []


def test_a_file_is_its_documents_and_ids_are_themselves(tokenizer, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(DOCUMENTS))
    from_file = find_sequences(file, tokenizer, 2, 30)
    from_list = find_sequences([text.strip() for text in DOCUMENTS], tokenizer, 2, 30)
    assert from_file.fingerprint() == from_list.fingerprint()
    assert from_file.source == str(file)
    ids = torch.stack([each["input_ids"][0] for each in from_list.inputs])
    for given in (ids, list(ids), [{"input_ids": row} for row in ids], [row.tolist() for row in ids]):
        assert find_sequences(given, None, 2, 30).fingerprint() == from_list.fingerprint()
    dataset = PackedDataset(ids.flatten().numpy(), None, 30)
    assert find_sequences(dataset, None, 2, 30).fingerprint() == from_list.fingerprint()
    ids[1, 3] += 1
    assert find_sequences(ids, None, 2, 30).fingerprint() != from_list.fingerprint()


def test_boundaries_restart_positions_where_documents_start(tokenizer):
    recipe = Recipe(document_boundaries=True)
    found = find_sequences(DOCUMENTS, tokenizer, 3, 50, recipe)
    ids = torch.cat([each["input_ids"][0] for each in found.inputs])
    positions = torch.cat([each["position_ids"][0] for each in found.inputs])
    starts = {0, *(ids == tokenizer.eos_token_id).nonzero().flatten().add(1).tolist(), 50, 100}
    assert {i for i in range(150) if positions[i] == 0} == {i for i in starts if i < 150}


def test_held_out_documents_of_a_recipe(tokenizer, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(DOCUMENTS))
    held = find_sequences(None, tokenizer, 1000, 10, Recipe(data=(str(file),), heldout=0.5))
    rest = sum(each["input_ids"].shape[1] for each in held.inputs)
    assert 0 < rest < len(ids_of(tokenizer, DOCUMENTS)) - 30
    named = find_sequences(None, tokenizer, 2, 30, Recipe(data=("nowhere",), heldout=(str(file),)))
    assert named.fingerprint() == find_sequences(file, tokenizer, 2, 30).fingerprint()
    with pytest.raises(ValueError, match="no held-out text"):
        find_sequences(None, tokenizer, 2, 30, Recipe(data=(str(file),), heldout=0.0))
    with pytest.raises(ValueError, match="text is missing"):
        find_sequences(None, tokenizer, 2, 30)


def test_only_what_is_needed_is_read(tokenizer):
    def documents():
        yield from DOCUMENTS
        raise AssertionError("read too far")

    assert len(find_sequences(documents(), tokenizer, 2, 30).inputs) == 2


def test_what_is_missing_is_reported(tokenizer):
    few = find_sequences(DOCUMENTS[:1], tokenizer, 10, 20)
    assert 0 < len(few.inputs) < 10
    assert few.missing == [f"the text given has {len(few.inputs)} of the 10 requested sequences"]
    short = find_sequences(["tiny"], tokenizer, 1, 1000)
    assert "shorter than 1000 tokens" in short.missing[0]
    for nothing in ([], [torch.tensor([3])], torch.zeros(0, 5, dtype=torch.long)):
        found = find_sequences(nothing, tokenizer, 2, 30)
        assert found.inputs == []
        assert "nothing was measured" in found.missing[-1]
        assert found.fingerprint()


def test_unusable_text_is_rejected(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="list of documents"):
        find_sequences("Once upon a time", tokenizer, 1, 30)
    with pytest.raises(ValueError, match="tokenizer is missing"):
        find_sequences(DOCUMENTS, None, 1, 30)
    with pytest.raises(TypeError, match="not both"):
        find_sequences([DOCUMENTS[0], torch.tensor([1, 2])], tokenizer, 9, 30)
    with pytest.raises(TypeError, match="got int"):
        find_sequences(7, tokenizer, 1, 30)
    with pytest.raises(ValueError, match=r"integers \[T\]"):
        find_sequences([torch.rand(4)], None, 1, 30)
    with pytest.raises(ValueError, match="must have input_ids"):
        find_sequences([{"ids": [1, 2]}], None, 1, 30)
    with pytest.raises(ValueError, match="length must be"):
        find_sequences(DOCUMENTS, tokenizer, 1, 1)
