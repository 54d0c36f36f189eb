"""A call without memory describes the call: shapes, strides, dtypes, and what a new tensor like each would have."""

from __future__ import annotations

import torch

from affine_attention.ops.call import AttentionCall, CallSpec, Rows, TensorSpec
from affine_attention.ops.visibility import Visibility


def test_a_spec_says_what_the_tensor_says():
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


def test_who_needs_a_gradient():
    x = torch.zeros(1, 1, 2, 2)
    call = AttentionCall(x, x, x, Rows(), Visibility(1, 2, 2, x.device), 1.0)
    assert not call.needs_gradient
    call = call._replace(rows=Rows(alpha=torch.zeros(1, 1, 2, requires_grad=True)))
    assert call.needs_gradient
    assert not call.rows.is_plain
    with torch.no_grad():
        assert not call.needs_gradient
