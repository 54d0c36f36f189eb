"""Calls and specs: shapes, strides and dtypes without memory, and the scale that `explain` uses."""

from __future__ import annotations

import pytest
import torch

from affine_attention import attention, explain
from affine_attention.ops import api
from affine_attention.ops.call import AttentionCall, CallSpec, Rows, TensorSpec, distinct
from affine_attention.ops.visibility import Visibility


def test_a_spec_describes_its_tensor():
    for x in (torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 3, 5).transpose(1, 2), torch.zeros(2, 3, 4, 10)[..., :5]):
        spec = TensorSpec.of(x)
        assert (spec.shape, spec.stride(), spec.stride(1)) == (tuple(x.shape), x.stride(), x.stride(1))
        assert (spec.dtype, spec.device, spec.numel()) == (x.dtype, x.device, x.numel())
        assert (spec.element_size(), spec.get_device(), spec.is_cuda) == (4, -1, False)
        assert spec.fresh_strides == torch.empty_like(x).stride()


def test_a_call_without_memory_holds_no_tensor():
    x, row = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    mask = torch.ones(1, 3, dtype=torch.bool)
    seen = Visibility(1, 3, 3, x.device, is_causal=True, key_mask=mask)
    call = AttentionCall.of(x, x, x, alpha=row, visibility=seen, softmax_scale=0.5, nonnegative_alpha=True)
    spec = CallSpec.of(call)
    assert spec.query.shape == (1, 2, 3, 4)
    assert (spec.rows.alpha.shape, spec.rows.beta, spec.rows.is_plain) == ((1, 2, 3), None, False)
    assert isinstance(spec.visibility.key_mask, TensorSpec)
    assert spec.visibility.is_causal
    assert (spec.softmax_scale, spec.nonnegative_alpha) == (0.5, True)


def test_repeated_tensors_become_views():
    x, y = torch.zeros(2, requires_grad=True), torch.ones(2)
    given = (x, y, None, x, None, y)
    found = distinct(given)
    assert [a is b for a, b in zip(found, given, strict=True)] == [True, True, True, False, True, False]
    assert found[3].data_ptr() == x.data_ptr()
    assert found[3].requires_grad


def test_a_call_needs_a_gradient_if_an_input_does():
    x = torch.zeros(1, 1, 2, 2)
    call = AttentionCall(x, x, x, Rows(), Visibility(1, 2, 2, x.device), 1.0)
    assert not call.needs_gradient
    call = call._replace(rows=Rows(alpha=torch.zeros(1, 1, 2, requires_grad=True)))
    assert call.needs_gradient
    assert not call.rows.is_plain
    with torch.no_grad():
        assert not call.needs_gradient


@pytest.mark.parametrize(("given", "expected"), [(None, 0.25), (2.0, 2.0), (-1, -1.0)])
def test_explain_uses_the_softmax_scale_of_the_call(given, expected, monkeypatch):
    """The route depends on the scale: kernels need a positive one."""
    calls = []
    real = api._choose
    monkeypatch.setattr(api, "_choose", lambda call, impl: calls.append(call) or real(call, impl))
    x = torch.zeros(1, 1, 3, 16)
    api.forget_plans()
    explain(x, x, x, softmax_scale=given)
    attention(x, x, x, softmax_scale=given)
    assert [(call.softmax_scale, call.scale_is_default) for call in calls] == [(expected, given is None)] * 2
    api.forget_plans()
