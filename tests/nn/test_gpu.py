"""The modules on a CUDA GPU: fused kernels, eager and compiled, and decoding."""

from __future__ import annotations

import pytest
import torch

from affine_attention import (
    AffineScale,
    KeyValueCache,
    Mechanism,
    SelfAttention,
    attention,
    commit_running_alpha,
    explain,
)
from affine_attention.nn import PRESETS
from affine_attention.ops.fused.plan import WEIGHTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def make_layer(name: str, dtype=torch.bfloat16) -> SelfAttention:
    torch.manual_seed(0)
    layer = SelfAttention(256, 4, 2, name)
    for parameter in layer.mechanism.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer.to("cuda", dtype)


def gradients(layer, hidden, **options):
    layer.zero_grad()
    out = layer(hidden, **options)
    out.float().square().mean().backward()
    commit_running_alpha(layer)
    return out, {name: p.grad.clone() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("name", [name for name in PRESETS if Mechanism.named(name).weights in WEIGHTS])
@pytest.mark.parametrize("packed", [False, True])
def test_fused_equals_composed(name, packed):
    hidden = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    options = {"segment_ids": torch.arange(200, device="cuda").expand(2, 200) // 70} if packed else {}
    results = []
    for impl in ("fused", "composed"):
        layer = make_layer(name)
        layer.impl = impl
        results.append(gradients(layer, hidden, **options))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0.03, atol=0.03)
    for parameter, grad in results[0][1].items():
        other = results[1][1][parameter]
        assert (grad - other).float().norm() <= 0.02 * other.float().norm(), parameter


@pytest.mark.parametrize("name", ["affine", "affine_gated", "sink"])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_into_one_graph(name, packed):
    hidden = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    options = {"segment_ids": torch.arange(200, device="cuda").expand(2, 200) // 70} if packed else {}
    eager = gradients(make_layer(name), hidden, **options)
    layer = make_layer(name)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    out = compiled(hidden, **options)
    out.float().square().mean().backward()
    torch.testing.assert_close(out, eager[0], rtol=0.03, atol=0.03)
    for parameter, p in layer.named_parameters():
        assert (p.grad - eager[1][parameter]).float().norm() <= 0.02 * p.grad.float().norm(), parameter


@pytest.mark.parametrize("name", PRESETS)
def test_decoding_uses_the_decode_kernel_and_equals_prefill(name):
    layer = make_layer(name, torch.float32).eval()
    hidden = torch.randn(2, 60, 256, device="cuda")
    with torch.no_grad():
        whole = layer(hidden)
        cache = KeyValueCache()
        steps = [layer(part, cache=cache) for part in hidden.split([50, 1, 4, 5], dim=1)]
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
        query, key = torch.randn(1, 4, 1, 64, device="cuda"), torch.randn(1, 2, 60, 64, device="cuda")
        assert explain(query, key, key, is_causal=True).kernels == ("decode",)


def test_deterministic_algorithms_avoid_cudnn():
    x = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert explain(x, x, x, is_causal=True).kernels == ("sdpa",)
    torch.use_deterministic_algorithms(True)
    try:
        choice = explain(x, x, x, is_causal=True)
        attention(x, x, x, is_causal=True).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert choice.kernels == ("flash",)
    assert "deterministic" in choice.reason


def test_commit_does_not_synchronise():
    model = torch.nn.ModuleList(make_layer("affine") for _ in range(3))
    for layer in model:
        layer(torch.randn(2, 40, 256, device="cuda", dtype=torch.bfloat16)).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        commit_running_alpha(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all((layer.mechanism.scale.running_alpha > 0).all() for layer in model)


def test_a_commit_inside_a_cuda_graph_runs_with_every_replay():
    """Forward of alpha and beta, backward and commit captured as one graph equal the eager steps."""

    def make():
        torch.manual_seed(0)
        scales = [AffineScale(Mechanism.named("affine"), 32, 4, device="cuda") for _ in range(3)]
        return torch.nn.ModuleList(scales)

    def step(model, hidden):
        for scale in model:
            alpha, beta = scale(hidden, 64)
            (alpha + beta).sum().backward()
        commit_running_alpha(model)

    batches = [torch.randn(2, 40, 32, device="cuda") * (n + 1) for n in range(4)]
    eager, captured = make(), make()
    for hidden in batches:
        step(eager, hidden)
    static = batches[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(captured, static)  # warm-up; it ends with a commit, so nothing is collected when the capture starts
        captured.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    for scale in captured:
        scale.running_alpha.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, static)
    for hidden in batches:
        static.copy_(hidden)
        graph.replay()
    for a, b in zip(eager, captured, strict=True):
        assert torch.equal(a.running_alpha, b.running_alpha)
