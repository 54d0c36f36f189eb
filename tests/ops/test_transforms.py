"""torch.func's transforms of `attention` equal those of the formula written out in PyTorch, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jacrev, vjp, vmap

from affine_attention import attention

B, H, G, T, S, D, V = 2, 4, 2, 5, 7, 8, 3


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def formula(query, key, value, alpha=None, beta=None, sink=None, gate=None, norm_weight=None, mask=None, window=None):
    """Causal attention with T x S weights; autograd and torch.func differentiate it."""
    key, value = (x.repeat_interleave(H // G, -3) for x in (key, value))
    scores = query @ key.mT * D**-0.5
    position, column = torch.arange(T)[:, None] + S - T, torch.arange(S)
    seen = column <= position
    if window is not None:
        seen = seen & (position - column < window)
    if mask is not None:
        seen = seen & mask[..., None, None, :]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        column_of_sink = sink[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column_of_sink], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    if alpha is not None:
        weights = weights * alpha[..., None]
    if beta is not None:
        weights = weights + beta[..., None] * seen
    out = weights @ value
    if norm_weight is not None:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6) * norm_weight
    return out if gate is None else out * gate


def make(*names, batched=()):
    shapes = {
        "query": (B, H, T, D), "key": (B, G, S, D), "value": (B, G, S, D), "alpha": (B, H, T), "beta": (B, H, T),
        "sink": (H,), "gate": (B, H, T, D), "norm_weight": (D,),
    }  # fmt: skip
    used = ("query", "key", "value", *names)
    return {name: normal(*((V,) if name in batched else ()), *shapes[name], seed=n) for n, name in enumerate(used)}


ROWS = [(), ("sink",), ("alpha", "beta", "sink", "gate"), ("norm_weight", "gate")]


def close(own, expected):
    torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("names", ROWS, ids=lambda x: "+".join(x) or "softmax")
def test_grad_and_vjp(names):
    tensors = make(*names)
    weight = normal(B, H, T, D, seed=9)

    def of(function, **options):
        keys = tuple(tensors)
        return lambda *given: (function(**dict(zip(keys, given, strict=True)), **options) * weight).sum()

    every = tuple(range(len(tensors)))
    own = grad(of(attention, is_causal=True), argnums=every)(*tensors.values())
    for a, b in zip(own, grad(of(formula), argnums=every)(*tensors.values()), strict=True):
        close(a, b)
    out, pull = vjp(lambda q: attention(**(tensors | {"query": q}), is_causal=True), tensors["query"])
    close(out, formula(**tensors))
    close(pull(weight)[0], own[0])


@pytest.mark.parametrize("names", ROWS, ids=lambda x: "+".join(x) or "softmax")
@pytest.mark.parametrize("batched", ["query", "key value sink norm_weight", "query alpha"])
def test_vmap_and_gradients_per_sample(names, batched):
    chosen = batched.split()
    tensors = make(*names, batched=chosen)
    dims = tuple(0 if name in chosen else None for name in tensors)
    keys = tuple(tensors)

    def of(function, **options):
        return lambda *given: function(**dict(zip(keys, given, strict=True)), **options)

    def loss_of(function, **options):
        return lambda *given: of(function, **options)(*given).square().sum()

    values = tuple(tensors.values())
    close(vmap(of(attention, is_causal=True), dims)(*values), vmap(of(formula), dims)(*values))
    every = tuple(range(len(keys)))
    own = vmap(grad(loss_of(attention, is_causal=True), argnums=every), dims)(*values)
    for name, a, b in zip(keys, own, vmap(grad(loss_of(formula), argnums=every), dims)(*values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


def test_masks_windows_and_other_dimensions():
    tensors = make("alpha", "beta")
    mask = torch.rand(V, B, S, generator=torch.Generator().manual_seed(3)) < 0.8
    mask[..., 0] = True
    query = normal(B, H, V, T, D)  # batched in its third dimension

    def run(function, **options):
        def of(q, m):
            return function(**(tensors | {"query": q}), mask=m, **options)

        return vmap(of, (2, 0), 1)(query, mask)

    close(run(attention, is_causal=True), run(formula))
    ids = torch.randint(0, 2, (V, B, T), generator=torch.Generator().manual_seed(4))
    q, k, v = normal(V, B, H, T, D), normal(V, B, G, T, D, seed=1), normal(V, B, G, T, D, seed=2)
    own = vmap(lambda *given: attention(*given[:3], segment_ids=given[3], window=3))(q, k, v, ids)
    for n in range(V):
        close(own[n], attention(q[n], k[n], v[n], segment_ids=ids[n], window=3, impl="reference"))


def test_jacobians_and_nested_vmap():
    tensors = make()
    own = jacrev(lambda q: attention(q, tensors["key"], tensors["value"], is_causal=True))(tensors["query"])
    close(own, jacrev(lambda q: formula(q, tensors["key"], tensors["value"]))(tensors["query"]))
    query = normal(2, V, B, H, T, D)
    nested = vmap(vmap(lambda q: attention(q, tensors["key"], tensors["value"], is_causal=True)))(query)
    close(nested[1, 2], formula(query[1, 2], tensors["key"], tensors["value"]))


def test_second_derivatives_and_wrong_arguments_are_refused():
    tensors = make()

    def loss(q):
        return attention(q, tensors["key"], tensors["value"]).square().sum()

    with pytest.raises(NotImplementedError, match="attention can be differentiated once"):
        grad(lambda q: grad(loss)(q).square().sum())(tensors["query"])
    with pytest.raises(ValueError, match="window must be at least 1"):
        grad(lambda q: attention(q, tensors["key"], tensors["value"], window=0).sum())(tensors["query"])
    with pytest.raises(ValueError, match=r"alpha must have 3 dimensions \[B, H, T\]"):
        vmap(lambda q: attention(q, tensors["key"], tensors["value"], alpha=torch.ones(2)))(normal(V, B, H, T, D))
