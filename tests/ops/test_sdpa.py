"""Each PyTorch kernel: out, log-sum-exp and gradients, also with out and lse of a larger softmax."""

from __future__ import annotations

import pytest
import torch

from affine_attention import attention
from affine_attention.ops.sdpa import CPU_KERNELS, CUDA_KERNELS, PLAIN, choose_kernel, in_layout_of

KERNELS = [(kernel, "cpu") for kernel in (*CPU_KERNELS, PLAIN)] + [
    pytest.param(kernel, "cuda", marks=pytest.mark.gpu) for kernel in (*CUDA_KERNELS, PLAIN)
]


@pytest.mark.parametrize(("kernel", "device"), KERNELS, ids=lambda x: getattr(x, "name", x))
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sink", [None, 1.5])
def test_forward_and_backward_equal_autograd(kernel, device, is_causal, has_bias, sink):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    dtype = torch.bfloat16 if device == "cuda" and kernel is not PLAIN else torch.float32
    query, grad = (torch.randn(2, 4, 300, 16, device=device, dtype=dtype) for _ in range(2))
    key, value = (torch.randn(2, 2, 300, 16, device=device, dtype=dtype) for _ in range(2))
    if kernel.why_not(query, key, has_bias, is_causal) is not None:
        pytest.skip("the kernel does not support this call")
    seen = torch.rand(2, 1, 300, 300, device=device) < 0.5
    seen[..., 0] = True
    bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf) if has_bias else None

    out, lse, aux = kernel.forward(query, key, value, bias, is_causal, 0.3)
    out = out.contiguous()  # callers may change the memory layout before the backward
    if sink is not None:  # a larger softmax: out and lse with one more term in the denominator
        larger = torch.logaddexp(lse, torch.tensor(sink, device=device))
        out, lse = (out * torch.exp(lse - larger)[..., None]).to(dtype), larger
    grads = kernel.backward(grad, query, key, value, out, lse.contiguous(), aux, bias, is_causal, 0.3)

    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * 0.3
    if has_bias:
        scores = scores.masked_fill(~seen, -torch.inf)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(300, 300, dtype=torch.bool, device=device).tril(), -torch.inf)
    total = scores.logsumexp(-1)
    if sink is not None:
        total = torch.logaddexp(total, torch.tensor(sink, device=device, dtype=torch.float64))
    expected = torch.exp(scores - total[..., None]) @ leaves[2].repeat_interleave(2, 1)
    tolerance = {"rtol": 0.02, "atol": 0.06} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(lse.double(), total, rtol=1e-3, atol=1e-3)
    for got, want in zip(grads, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        torch.testing.assert_close(got.double(), want, **tolerance)


def test_the_choice_is_explained():
    query = torch.randn(1, 2, 4, 8)
    kernel, reason = choose_kernel(query, query, False, True)
    assert kernel.name == "cpu_flash"
    assert reason
    assert CUDA_KERNELS[0].why_not(query, query, True, True) == "is used only without a mask"
    assert "cpu tensors" in CPU_KERNELS[0].why_not(query.to("meta"), query.to("meta"), False, True)
    assert choose_kernel(query.to("meta"), query.to("meta"), False, True)[0] is PLAIN


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_heads_of_a_group_are_added_in_fp32(dtype):
    """PyTorch's CPU kernel adds them in half precision: with 16 heads the error of dK is above this limit."""
    heads, draw = 16, torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 65, 32, generator=draw).to(dtype)
    key, value = (torch.randn(1, 1, 65, 32, generator=draw).to(dtype) for _ in range(2))
    grad, wide = torch.ones_like(query), [x.double() for x in (query, key, value)]
    (kernel,) = CPU_KERNELS

    def gradients(query, key, value):
        out, lse, aux = kernel.forward(query, key, value, None, True, 0.2)
        return kernel.backward(grad.to(query.dtype), query, key, value, out, lse, aux, None, True, 0.2)

    for found, truth in zip(gradients(query, key, value), gradients(*wide), strict=True):
        assert found.dtype == dtype
        error = float((found.double() - truth).norm() / truth.norm())
        assert error < 0.5 * torch.finfo(dtype).eps, error


def heads_next_to_channels(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("channels", [slice(None), slice(0, 16)], ids=["whole", "part"])
@pytest.mark.parametrize("order", [heads_next_to_channels, torch.Tensor.contiguous])
def test_a_tensor_is_copied_only_into_another_layout(order, channels):
    query = order(torch.randn(2, 3, 5, 32))[..., channels]
    for x in (query.contiguous(), heads_next_to_channels(query)):
        found = in_layout_of(query, x)
        assert found.stride() == torch.empty_like(query).stride()
        assert torch.equal(found, x)
        assert (found is x) == (x.stride() == found.stride())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("parts", [{}, {"exclusion": 1.0}, {"sink": True}], ids=["plain", "exclusion", "sink"])
@pytest.mark.parametrize("impl", ["composed", "fused"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_do_not_depend_on_earlier_calls(is_causal, impl, parts):
    """PyTorch keeps one graph of cuDNN's backward for all layouts of the gradient (docs/decisions/0080)."""
    torch.manual_seed(0)
    length = 208 + 16 * is_causal + 32 * len(parts) + 64 * (impl == "fused")  # a key that no other test has used
    query, grad = (torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    key, value = (torch.randn(2, 2, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    given = {name: torch.ones(4, device="cuda") if name == "sink" else x for name, x in parts.items()}
    plain = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
    torch.autograd.grad(plain, leaves, heads_next_to_channels(grad))
    expected = torch.autograd.grad(
        attention(*(x.double() for x in leaves), is_causal=is_causal, impl="reference", **given), leaves, grad.double()
    )
    # Without parts, "fused" is PyTorch's own attention, which has the layout of its first call.
    layouts = [heads_next_to_channels] if impl == "fused" and "sink" not in parts else [
        heads_next_to_channels, torch.Tensor.contiguous
    ]  # fmt: skip
    for layout in layouts:
        out = attention(*leaves, is_causal=is_causal, impl=impl, **given)
        for got, want in zip(torch.autograd.grad(out, leaves, layout(grad)), expected, strict=True):
            assert (got - want).double().norm() <= 0.02 * want.norm(), layout.__name__
