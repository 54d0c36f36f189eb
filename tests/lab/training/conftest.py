"""Fixtures of the tests of `train`."""

from __future__ import annotations

import pytest

from .runs import Place


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("runs"))
