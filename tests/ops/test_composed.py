"""The composed implementation against the fp64 reference: forward and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from affine_attention import attention
from affine_attention.testing import (
    EXTRAS,
    MAX_ERROR_RATIO,
    MAX_ROW_ERROR_RATIO,
    Case,
    accuracy,
    grid_cases,
    make_inputs,
    run,
    run_oracle,
)

EXACT = 1e-10  # fp64 against fp64


def check_accuracy(case: Case, impl: str = "composed") -> None:
    norm, worst_row = accuracy(case, impl)
    for name, ratio in norm.items():  # NaN fails too
        assert ratio <= MAX_ERROR_RATIO, f"{name} of {case}: error ratio {ratio:.2f}"
        assert worst_row[name] <= MAX_ROW_ERROR_RATIO, f"worst row of {name} of {case}: {worst_row[name]:.2f}"


@pytest.mark.parametrize("case", grid_cases(120), ids=str)
def test_error_is_at_most_twice_that_of_plain_pytorch(case):
    check_accuracy(case)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("case", grid_cases()[:18], ids=str)
def test_error_with_an_extra_is_at_most_twice_that_of_plain_pytorch(case, extra):
    check_accuracy(replace(case, extra=extra))


@pytest.mark.slow
@pytest.mark.parametrize("case", grid_cases(1500, seed=1)[120:], ids=str)
def test_error_is_at_most_twice_that_of_plain_pytorch_more_cases(case):
    check_accuracy(case)


@pytest.mark.parametrize("mechanism", ["softmax", "sink", "affine", "affine_gated"])
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (1, 9), (3, 300), (300, 3), (260, 515)])
@pytest.mark.parametrize(
    "visibility",
    ["full", "causal", "causal+window", "window", "causal+segments", "causal+padding", "mask", "causal+head_mask"],
)
def test_fp64_equals_reference_where_lengths_differ(mechanism, queries, keys, visibility):
    inputs = make_inputs(Case(mechanism, visibility, queries=queries, keys=keys, dtype=torch.float64))
    result, truth = run(inputs, "composed"), run_oracle(inputs)
    for name in truth:
        torch.testing.assert_close(result[name], truth[name], rtol=EXACT, atol=EXACT, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_large_batches_are_processed_in_chunks_with_the_same_result(monkeypatch, extra):
    inputs = make_inputs(Case("affine_gated", "causal+segments+padding", batch=5, dtype=torch.float64, extra=extra))
    if not extra:
        inputs.tensors["sink"] = torch.linspace(-2, 2, 4, dtype=torch.float64)
    whole = run(inputs, "composed")
    monkeypatch.setattr("affine_attention.ops.composed.CHUNK_ELEMENTS", 4 * 65 * 16 * 2)
    parts = run(inputs, "composed")
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("extra", ["", *EXTRAS])
@pytest.mark.parametrize("visibility", ["causal", "causal+window", "segments+padding", "mask"])
def test_gradcheck(visibility, extra):
    inputs = make_inputs(Case("affine_gated", visibility, 1, 2, 1, 5, 7, 3, torch.float64, extra=extra))
    if not extra:
        inputs.tensors["sink"] = torch.tensor([0.3, 2.0], dtype=torch.float64)
    leaves = inputs.leaves()
    names = list(leaves)

    def call(*tensors):
        return attention(**dict(zip(names, tensors, strict=True)), **inputs.visible, impl="composed")

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


def test_only_requested_gradients():
    inputs = make_inputs(Case("affine_gated", dtype=torch.float64))
    truth = run_oracle(inputs)
    leaves = inputs.leaves()
    for name in leaves:
        given = {n: x.detach().requires_grad_(n == name) for n, x in leaves.items()}
        rows = {n: given[n] for n in ("alpha", "beta", "gate")}
        out = attention(given["query"], given["key"], given["value"], **rows, **inputs.visible, impl="composed")
        (grad,) = torch.autograd.grad(out, [given[name]], inputs.grad_out)
        torch.testing.assert_close(grad, truth[f"grad_{name}"], rtol=EXACT, atol=EXACT)


def test_second_derivative_raises():
    inputs = make_inputs(Case("affine"))
    leaves = inputs.leaves()
    out = attention(leaves["query"], leaves["key"], leaves["value"], alpha=leaves["alpha"], beta=leaves["beta"])
    (grad,) = torch.autograd.grad((out**2).sum(), [leaves["query"]], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("visibility", "extra"),
    [("causal", ""), ("causal+window", ""), ("causal+segments+padding", ""), *(("causal", each) for each in EXTRAS)],
)
def test_compiles_into_one_graph(visibility, extra):
    inputs = make_inputs(Case("affine_gated", visibility, extra=extra))
    leaves = inputs.leaves()

    def call(leaves):
        return attention(**leaves, **inputs.visible)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager, traced = call(leaves), compiled(leaves)
    torch.testing.assert_close(eager, traced)
    for a, b in zip(
        torch.autograd.grad(eager, list(leaves.values()), inputs.grad_out),
        torch.autograd.grad(traced, list(leaves.values()), inputs.grad_out),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("extra", [{}, {"norm_weight": True, "exclusion": True}])
def test_a_graph_takes_one_tensor_as_several_arguments(extra):
    """A compiler refuses an autograd function that gets one tensor twice."""

    def call(x, row):
        rows = {name: x[0, 0, 0] if name == "norm_weight" else row for name in extra}
        return attention(x, x, x, alpha=row, beta=row, gate=x, is_causal=True, **rows)

    results = []
    torch._dynamo.reset()
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(shape, generator=generator, requires_grad=True) for shape in ((2, 4, 9, 16), (2, 4, 9))]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_causal", [True, False])
def test_one_dynamic_graph_for_every_length(is_causal):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def call(leaves):
        return attention(**leaves, is_causal=is_causal)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=count)
    for length in (20, 33, 64, 100):
        leaves = make_inputs(Case("affine_gated", queries=length, keys=length)).leaves()
        torch.testing.assert_close(compiled(leaves), call(leaves))
        compiled(leaves).sum().backward()
    assert len(graphs) == 1


def test_long_sums_stay_accurate():
    """Sums of values in bf16 would be 75 % wrong at 128k tokens."""
    length = 131072
    value = torch.full((1, 1, length, 8), 1.0078125, dtype=torch.bfloat16)
    key = torch.zeros_like(value)
    query = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    beta = torch.full((1, 1, 1), 1 / length)
    out = attention(query, key, value, alpha=torch.zeros(1, 1, 1), beta=beta, is_causal=True, impl="composed")
    torch.testing.assert_close(out.float(), torch.full((1, 1, 1, 8), 1.0078125), rtol=4e-3, atol=0)


def test_autocast_converts_like_pytorchs_attention():
    inputs = make_inputs(Case("affine", "causal"))
    leaves = inputs.leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(
            leaves["query"], leaves["key"], leaves["value"], alpha=leaves["alpha"], beta=leaves["beta"], is_causal=True
        )
    assert out.dtype == torch.bfloat16
    low = {name: x.detach().bfloat16() if x.dim() == 4 else x.detach() for name, x in leaves.items()}
    by_hand = attention(low["query"], low["key"], low["value"], alpha=low["alpha"], beta=low["beta"], is_causal=True)
    assert torch.equal(out, by_hand)


def test_no_quadratic_memory():
    """A boolean T x S tensor would take 256 MiB; the peak of all memory must stay far below."""
    from benchmarks.measure import peak_memory

    for visibility in ("causal", "causal+window", "causal+segments", "causal+padding"):
        case = Case("affine", visibility, 1, 1, 1, 16384, 16384, 16)
        inputs = make_inputs(replace(case))
        peak = peak_memory(lambda inputs=inputs: run(inputs, "composed"))
        assert peak < 100 * 2**20, f"{visibility}: {peak / 2**20:.0f} MiB"
