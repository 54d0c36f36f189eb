"""W_a and the operator in one node give what they give as two nodes, forward and every gradient."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from affine_attention.ops.fused import INTERPRETED, projected
from affine_attention.ops.fused.plan import Route
from affine_attention.ops.fused.projection import projected_coefficients
from affine_attention.ops.visibility import Visibility

from ...interpreter import run_in_the_interpreter
from .routes import by_route, use_cpu_kernels

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_kernels = pytest.mark.skipif(not (INTERPRETED or ON_HOPPER), reason="needs a Hopper GPU")
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
# (batch, length, model dim, query heads, key-value heads, head dim)
SIZES = [(2, 33, 40, 3, 3, 64), (1, 70, 48, 4, 2, 40)] if INTERPRETED else [
    (2, 333, 200, 9, 3, 64), (1, 1024, 256, 8, 8, 128), (8, 512, 576, 9, 3, 64)
]  # fmt: skip


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """In the interpreter the route is the one of a Hopper GPU, with its Gluon kernel simulated."""
    projected.forget_plans()
    use_cpu_kernels(monkeypatch)
    if INTERPRETED:
        monkeypatch.setattr(
            projected, "choose_route",
            lambda call, needs_gradient: Route(
                "hopper", "hopper", "softmax output", "named by a test", shift=call.rows.gate is None
            ),
        )  # fmt: skip
    yield
    projected.forget_plans()


def draw(size, *, bias=True, sink=False, gate=False, masked=False):
    batch, length, model_dim, heads, groups, dim = size
    torch.manual_seed(0)

    def randn(*shape, dtype=torch.float16):
        return torch.randn(*shape, device=DEVICE).to(dtype)

    given = {
        "query": randn(batch, length, heads, dim).transpose(1, 2),
        "key": randn(batch, length, groups, dim).transpose(1, 2),
        "value": randn(batch, groups, length, dim),
        "sink": randn(heads) if sink else None,
        "gate": torch.sigmoid(randn(batch, heads, length, dim)) if gate else None,
        "hidden": randn(batch, length, model_dim),
        "weight": randn(heads, model_dim) * 0.2,
        "collected": torch.zeros(heads + 1, dtype=torch.float64, device=DEVICE) if bias else None,
    }
    running = torch.rand(heads, device=DEVICE) if bias else None
    mask = (torch.rand(batch, length, device=DEVICE) < 0.7) if masked else None
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
    return leaves, running, mask, randn(batch, heads, length, dim)


def run_together(leaves, running, mask, divisor=2048, sigmoid=False):
    get = leaves.get
    return projected.projected_attention(
        leaves["query"], leaves["key"], leaves["value"], get("sink"), get("gate"), leaves["hidden"], leaves["weight"],
        running, get("collected"), mask, None, divisor, sigmoid,
    )  # fmt: skip


def run_apart(leaves, running, mask, divisor=2048, sigmoid=False):
    activation = "sigmoid" if sigmoid else "linear_clipping"
    alpha, beta = projected_coefficients(
        leaves["hidden"], leaves["weight"], activation, running, divisor, mask, leaves.get("collected")
    )
    query = leaves["query"]
    seen = Visibility(query.shape[0], query.shape[2], query.shape[2], query.device, is_causal=True)
    return by_route("hopper", "hopper")(
        query=query, key=leaves["key"], value=leaves["value"], alpha=alpha, beta=beta, sink=leaves.get("sink"),
        gate=leaves.get("gate"), visibility=seen, softmax_scale=query.shape[3] ** -0.5, nonnegative_alpha=True,
    )  # fmt: skip


def assert_same(found, expected, name):
    if name == "query" and not INTERPRETED:  # its sums have no fixed order
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3, msg=lambda text: f"{name}: {text}")
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")


@needs_kernels
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": False}, {"sink": True}, {"gate": True, "masked": True}, {"masked": True}],
    ids=["affine", "no bias", "sink", "gate and padding", "padding"],
)
@pytest.mark.parametrize("sigmoid", [False, True])
def test_one_node_is_two_nodes(size, settings, sigmoid):
    leaves, running, mask, grad_out = draw(size, **settings)
    for _ in range(1 if INTERPRETED else 3):  # the first launch goes through Triton, later ones by address
        together, apart = (
            run(leaves, running, mask, sigmoid=sigmoid) for run in (run_together, run_apart)
        )  # fmt: skip
        assert torch.equal(together, apart)
        found, expected = (torch.autograd.grad(out, list(leaves.values()), grad_out) for out in (together, apart))
        for name, x, y in zip(leaves, found, expected, strict=True):
            assert x.dtype == y.dtype
            assert_same(x, y, name)


@needs_kernels
def test_gradients_that_are_not_wanted_are_not_made():
    leaves, running, mask, grad_out = draw(SIZES[0])
    out = run_together(leaves, running, mask)
    everything = torch.autograd.grad(out, list(leaves.values()), grad_out)
    for name, expected in zip(leaves, everything, strict=True):
        alone = {each: x.detach().requires_grad_(each == name) for each, x in leaves.items()}
        (found,) = torch.autograd.grad(run_together(alone, running, mask), [alone[name]], grad_out)
        assert_same(found, expected, name)


@needs_kernels
def test_unaligned_and_strided_gradients():
    leaves, running, mask, grad_out = draw(SIZES[0])
    room = torch.zeros(grad_out.numel() + 1, dtype=grad_out.dtype, device=DEVICE)
    shifted = room[1:].view(grad_out.shape).copy_(grad_out)
    strided = torch.stack([grad_out, grad_out], -1)[..., 0]
    expected = torch.autograd.grad(run_together(leaves, running, mask), list(leaves.values()), grad_out)
    for grad in (shifted, strided):
        found = torch.autograd.grad(run_together(leaves, running, mask), list(leaves.values()), grad)
        for name, x, y in zip(leaves, found, expected, strict=True):
            assert_same(x, y, name)


@needs_kernels
def test_a_second_derivative_is_refused():
    leaves, running, mask, _ = draw(SIZES[0])
    (grad,) = torch.autograd.grad(
        run_together(leaves, running, mask).square().sum(), [leaves["hidden"]], create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@needs_kernels
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"sink": True, "gate": True, "masked": True}])
def test_compiled_is_the_same_in_one_graph_of_two_operators(settings):
    leaves, running, mask, grad_out = draw(SIZES[0], **settings)
    names = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def keep(traced, _):
            names.extend(str(node.target) for node in traced.graph.nodes if "affine" in str(node.target))
            return make_boxed_func(traced)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(run_together, backend=backend, fullgraph=True)
    out = compiled(leaves, running, mask)
    assert torch.equal(out, run_together(leaves, running, mask))
    found, expected = (
        torch.autograd.grad(each, list(leaves.values()), grad_out)
        for each in (out, run_together(leaves, running, mask))
    )
    for name, x, y in zip(leaves, found, expected, strict=True):
        assert_same(x, y, name)
    assert names == [f"affine_attention.projected_{which}.default" for which in ("forward", "backward")]


@needs_hopper
@pytest.mark.parametrize("preset", ["affine", "affine_gated", "head_gated", "affine_no_bias"])
def test_a_layer_takes_one_node_and_an_observed_layer_two(preset):
    from affine_attention import SelfAttention

    torch.manual_seed(0)
    layer = SelfAttention(256, 4, 2, mechanism=preset, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    results = []
    for observer in (None, lambda *_, **__: None):
        layer.mechanism.observer = observer
        layer.zero_grad()
        out = layer(hidden)
        names, waiting = set(), [out.grad_fn]
        while waiting:
            node = waiting.pop()
            names.add(type(node).__name__)
            waiting += [each for each, _ in node.next_functions if each is not None]
        assert ("_ProjectedAttentionBackward" in names) == (observer is None)
        out.float().square().sum().backward()
        results.append((out.detach(), [p.grad.clone() for p in layer.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    for x, y in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(x, y, rtol=3e-2, atol=3e-2 * y.abs().max().item())


@needs_hopper
def test_hooks_and_large_calls_take_two_nodes():
    from affine_attention import AffineScale, Mechanism

    scale = AffineScale(Mechanism.named("affine"), 64, 2, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(1, 64, 64, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def attend():
        return scale.attend(hidden, query, query, query, 2048, None, None, lambda _: None, None)

    assert attend() is not None
    handle = scale.register_forward_hook(lambda *_: None)
    assert attend() is None
    handle.remove()
    with torch.no_grad():
        assert attend() is None
    query = query.float()
    assert attend() is None


@pytest.mark.skipif(INTERPRETED or ON_HOPPER, reason="the tests above run the kernels")
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
