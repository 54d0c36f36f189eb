"""Held-out documents depend only on their text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affine_attention.lab.data.heldout import CopySplit, FractionSplit, hash_fraction, heldout_documents
from affine_attention.lab.recipe import Recipe

from .texts import make_documents

DOCUMENTS = make_documents(2000)


def held(documents, fraction=0.1):
    split = FractionSplit(fraction)
    return {text for text in documents if split.holds(text)}


def test_the_share_is_about_what_was_asked():
    assert 150 < len(held(DOCUMENTS)) < 250
    assert held(DOCUMENTS, 0.05) < held(DOCUMENTS, 0.1)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), count=st.integers(1, 2000))
def test_order_and_added_documents_change_nothing(seed, count):
    documents = DOCUMENTS[:count]
    random.Random(seed).shuffle(documents)
    assert held(documents) == held(DOCUMENTS) & set(documents)


def test_copies_go_with_their_document_whatever_their_white_space():
    text = DOCUMENTS[0]
    assert hash_fraction(text) == hash_fraction("  " + text.replace("\n", "\r\n\t") + "\n")
    assert hash_fraction(text) != hash_fraction(text + ".")
    split = CopySplit(DOCUMENTS[:10])
    assert [split.holds(t.replace(" ", "  ")) for t in DOCUMENTS[:20]] == [True] * 10 + [False] * 10
    assert split.copies == 10
    assert not CopySplit().holds(text)


@pytest.mark.parametrize("count", [2, 5, 30])
def test_the_smallest_share_holds_one_out(count):
    split = FractionSplit(1e-9)
    assert sum(split.holds(text) for text in DOCUMENTS[:count]) == 0
    share = split.smallest_fraction()
    assert 0 < share < 1
    assert len(held(DOCUMENTS[:count], share)) >= 1
    assert len(held(DOCUMENTS[:count], share * 0.85)) <= 1


def test_the_documents_that_a_recipe_never_trains_on(tmp_path):
    texts = [f"Story {n}, long enough to be told." for n in range(50)]
    source, other = tmp_path / "a.txt", tmp_path / "b.txt"
    source.write_text("\n\n".join(texts))
    other.write_text("Another story.")
    words, documents = heldout_documents(Recipe(data=(str(source),), heldout=0.3))
    split = FractionSplit(0.3)
    assert list(documents) == [text for text in texts if split.holds(text)]
    assert str(source) in words
    assert heldout_documents(Recipe(data=(str(source),), heldout=0.0)) is None
    assert list(heldout_documents(Recipe(data=(str(source),), heldout=(str(other),)))[1]) == ["Another story."]
