"""Calls that the fused kernels do not support, and the kernel tests in Triton's interpreter if there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from affine_attention.ops.call import AttentionCall, CallSpec
from affine_attention.ops.fused import plan as planning
from affine_attention.ops.fused.shared.tile_sizes import HOPPER, UNIVERSAL, table_config
from affine_attention.ops.visibility import Visibility

KERNELS = ("causal", "forward", "query_grads", "key_grads")


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_kernels.py runs on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already in the interpreter")
def test_the_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    file = Path(__file__).with_name("test_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    result = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def refusal(monkeypatch: pytest.MonkeyPatch, *, interpreted: bool = True, dim: int = 8, **changes) -> str | None:
    """`why_not_fused` of a small call that the interpreter supports, with one change."""
    pytest.importorskip("triton")
    monkeypatch.setattr(planning, "INTERPRETED", interpreted)
    x = torch.zeros(1, 1, 4, dim)
    inputs = {"query": x, "key": x, "value": x} | {name: v for name, v in changes.items() if name != "visibility"}
    visibility = Visibility(1, 4, 4, x.device, **changes.get("visibility", {}))
    return planning.why_not_fused(AttentionCall.of(**inputs, visibility=visibility, softmax_scale=1.0))


def test_supported_calls_have_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch) is None
    assert refusal(monkeypatch, dim=256, visibility={"is_causal": True, "window": 3}) is None


def test_reasons_name_rule_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, 4, 8)
    assert refusal(monkeypatch, interpreted=False) == "needs a CUDA GPU, got cpu tensors"
    assert "up to 256, got 257" in refusal(monkeypatch, dim=257)
    assert "got float64" in refusal(monkeypatch, query=x.double(), key=x.double(), value=x.double())
    dense = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    assert "dense mask" in refusal(monkeypatch, visibility={"pair_mask": dense})


def test_a_sink_of_each_row_takes_the_flash_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither cuDNN nor the Hopper kernels have one sink for each row."""
    pytest.importorskip("triton")
    monkeypatch.setattr(planning, "capability_of", lambda x: 90)
    x = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    call = AttentionCall.of(
        x,
        x,
        x,
        sink=torch.zeros(1, 2, 64),
        visibility=Visibility(1, 64, 64, x.device, is_causal=True),
        softmax_scale=1.0,
    )
    spec = CallSpec.of(call)
    for each in (spec.query, spec.key, spec.value):
        each.device = torch.device("cuda", 0)
    assert planning.why_not_plain(spec) == "takes one sink per head [H], got a sink per row [B, H, T]"
    route = planning.choose_route(spec, True)
    assert route.kernels == ("flash",)
    assert "got a sink per row" in route.reason


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_head_dim_has_a_configuration(capability: tuple[int, int], itemsize: int) -> None:
    for kernel in KERNELS:
        for dim in (1, 16, 65, 128, 129, 256):
            assert table_config(kernel, dim, itemsize, capability).block_m >= 16


def test_tables_name_known_kernels() -> None:
    assert {name for name, _, _ in HOPPER | UNIVERSAL} == set(KERNELS)
