"""Fixtures of the tests of the data."""

from __future__ import annotations

import pytest

from affine_attention.lab.data import train_tokenizer

from .texts import DOCUMENTS


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(DOCUMENTS, 300)
