"""Names cannot leave their folder."""

from __future__ import annotations

import pytest

from affine_attention.lab.names import check_name, folder_name
from affine_attention.lab.recipe import Recipe


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", ".hidden", "a\\b", "C:x", "", " ", "a\x1bb", "x" * 101, None])
def test_names_that_leave_the_folder_are_rejected(name):
    with pytest.raises(ValueError, match="name must"):
        check_name("name", name)
    if isinstance(name, str):
        with pytest.raises(ValueError, match="name must"):
            Recipe(name=name)


def test_ordinary_names_stay():
    for name in ("run", "tiny_cpu", "A run, ü", "x" * 100):
        assert check_name("name", name) == name
    assert folder_name("affine+activation=sigmoid") == "affine_activation=sigmoid"
    assert folder_name("../..") == "_.."
    assert folder_name("") == "_"


@pytest.mark.parametrize("setting", ["data", "heldout", "student", "teacher", "tokenizer", "text_column"])
def test_an_empty_setting_is_an_unset_variable(setting):
    value = ("",) if setting in ("data", "heldout") else ""
    with pytest.raises(ValueError) as error:
        Recipe(**{setting: value})
    assert setting in str(error.value)
    assert "empty" in str(error.value)
