"""A device name becomes a torch.device, or a clear error."""

from __future__ import annotations

import pytest
import torch

from affine_attention.lab.device import choose_device


def test_names_become_devices():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device(None).type in ("cpu", "cuda")


@pytest.mark.parametrize("name", ["nope", "", "cuda:99", "meta", "mps", 3.5, "cpu:nope"])
def test_any_other_is_one_sentence(name):
    with pytest.raises(ValueError) as error:
        choose_device(name)
    assert "device" in str(error.value)
    assert "\n" not in str(error.value)
