"""Files written one tensor at a time are readable by the safetensors library."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from affine_attention.lab.training.tensorfile import DTYPES, read_tensors, write_bytes, write_tensors


def make_tensors():
    torch.manual_seed(0)
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    tensors["random"] = torch.randn(7, 11)
    return tensors | {
        "strided": tensors["random"].T,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bits": torch.tensor([-0.0, torch.inf, torch.nan, 1e-45]),
        "bf16": torch.randn(33).bfloat16(),
    }


def test_the_library_reads_every_dtype_and_shape(tmp_path):
    tensors, path = make_tensors(), tmp_path / "x.safetensors"
    written = write_tensors(path, tensors.items(), lambda tensor: tensor)
    read = load_file(path)
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].contiguous().view(torch.uint8) if tensor.dim() else read[name],
                           tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor), name  # fmt: skip
    content = path.read_bytes()
    assert written.bytes == len(content)
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert dict(read_tensors(path)).keys() == tensors.keys()


def test_only_one_tensor_is_fetched_at_a_time(tmp_path):
    fetched = []

    def fetch(tensor):
        # Everything before this one is in the file already.
        fetched.append(path.stat().st_size)
        return tensor

    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.zeros(1000), "b": torch.zeros(1000)}.items(), fetch)
    assert fetched[1] - fetched[0] == 4000


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    write_bytes(tmp_path / "x", [b"first"])
    with pytest.raises(FileExistsError):
        write_bytes(tmp_path / "x", [b"second"])
    assert (tmp_path / "x").read_bytes() == b"first"
