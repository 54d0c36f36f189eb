"""NaN, infinity and overflow in keys and values that a query does not see never reach its output or its gradient."""

from __future__ import annotations

import pytest
import torch

from affine_attention import attention
from affine_attention.ops.nonfinite_keys import largest_safe, zero_nonfinite
from affine_attention.testing import Case, make_inputs, run

NONFINITE = 40


@pytest.mark.parametrize("impl", ["composed", "reference"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("mechanism", ["softmax", "sink", "affine", "affine_gated"])
@pytest.mark.parametrize("where", ["key", "value"])
def test_rows_that_do_not_see_a_nonfinite_key_are_unchanged(impl, bad, mechanism, where):
    inputs = make_inputs(Case(mechanism, "causal"))
    documents = (torch.arange(65) >= 50).long().expand(2, 65)
    for visible in (
        {"is_causal": True},
        {"is_causal": True, "window": 8},
        {"segment_ids": documents, "is_causal": True},
    ):
        inputs.visible.clear()
        inputs.visible.update(visible)
        clean = run(inputs, impl)["out"]
        changed = inputs.tensors[where].clone()
        changed[:, :, NONFINITE, 3] = bad
        rows = {name: inputs.tensors[name] for name in ("alpha", "beta", "sink", "gate")}
        parts = {name: inputs.tensors[name] for name in ("query", "key", "value")} | {where: changed}
        out = attention(**parts, **rows, **visible, impl=impl)
        stop = 48 if "window" in visible else 50 if "segment_ids" in visible else 65
        sees = [NONFINITE <= i < stop for i in range(65)]
        assert torch.equal(out[:, :, [not s for s in sees]], clean[:, :, [not s for s in sees]])
        assert torch.isnan(out[:, :, sees]).all(), "a row that sees a non-finite key must be NaN"


@pytest.mark.parametrize("impl", ["composed", "reference"])
@pytest.mark.parametrize("mechanism", ["softmax", "sink", "affine_gated"])
def test_gradients_of_rows_that_do_not_see_it_are_finite(impl, mechanism):
    inputs = make_inputs(Case(mechanism, "causal"))
    for name in ("key", "value"):
        inputs.tensors[name][:, :, NONFINITE] = torch.nan
    inputs.grad_out[:, :, NONFINITE:] = 0  # a loss over the rows before it
    for name, x in run(inputs, impl).items():
        if name != "out":
            assert torch.isfinite(x).all(), name


@pytest.mark.parametrize("impl", ["composed", "reference"])
@pytest.mark.parametrize("mechanism", ["softmax", "sink", "affine_gated"])
def test_padding_may_hold_anything(impl, mechanism):
    inputs = make_inputs(Case(mechanism, "causal+padding"))
    clean = run(inputs, impl)
    mask = inputs.visible["mask"]
    assert not mask.all()
    for name in ("key", "value"):
        inputs.tensors[name] = inputs.tensors[name].masked_fill(~mask[:, None, :, None], torch.nan)
    for name, x in run(inputs, impl).items():
        assert torch.equal(x, clean[name]), name


def test_finite_tensors_are_returned_unchanged():
    x = torch.randn(1, 2, 3, 4)
    assert zero_nonfinite(x, x)[2] is None
    assert zero_nonfinite(x, x)[0] is x
    x[0, 1, 2, 3] = 3e38  # large but finite
    assert zero_nonfinite(x, x)[2] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_largest_safe_key_overflows_no_score_and_infinity_is_above_it(dtype):
    limit = torch.tensor(largest_safe(dtype), dtype=dtype)
    assert limit.isfinite()
    assert not torch.tensor(torch.inf, dtype=dtype) <= largest_safe(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    query = min(2.0**40, torch.finfo(dtype).max)
    assert (limit.to(wide) * query * 128).isfinite()
