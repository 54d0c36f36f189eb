"""The fused kernels against the fp64 reference, on a GPU if available, otherwise in Triton's interpreter.

The interpreter must be switched on before Triton is imported, so without a GPU `test_flash.py` runs this file in a
process of its own.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from affine_attention import attention
from affine_attention.ops.call import AttentionCall
from affine_attention.ops.fused.op import traced_attention
from affine_attention.ops.fused.plan import why_not_fused
from affine_attention.ops.visibility import Visibility
from affine_attention.testing import MAX_ERROR_RATIO, error_ratio, naive_attention, sdpa_attention

from ....interpreter import skip_for_time
from ..routes import by_route, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
if not (INTERPRETED or ON_GPU):
    pytest.skip("no GPU: test_flash.py runs this file in the interpreter", allow_module_level=True)

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# bf16 matmuls are silently wrong in the interpreter.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
NAMES = ("query", "key", "value", "alpha", "beta", "sink", "gate")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def flash_attention(**given):
    """The flash route, also if `auto` would choose another."""
    route = "empty" if 0 in given["query"].shape or 0 in given["key"].shape else "flash"
    return by_route(route, route)(**given)


def by_operator(*, visibility, softmax_scale, **inputs):
    """The operators as called by a compiled graph."""
    call = AttentionCall.of(**inputs, visibility=visibility, softmax_scale=softmax_scale)
    return traced_attention(call, needs_gradient=True)


# name: (B, H, G, T, S, D), visibility, the parts of the equation: Alpha, Beta, Sink, a sink of each Row, Gate
CASES = {
    "causal": ((2, 4, 2, 70, 70, 20), {"is_causal": True}, "absg"),
    "plain": ((1, 2, 2, 70, 70, 16), {"is_causal": True}, ""),
    "affine": ((1, 2, 1, 65, 65, 16), {"is_causal": True}, "ab"),
    "sink": ((1, 4, 1, 33, 33, 8), {"is_causal": True}, "s"),
    "gate": ((1, 2, 1, 33, 33, 8), {"is_causal": True}, "g"),
    "row sinks": ((1, 4, 2, 70, 70, 8), {"is_causal": True}, "r"),
    "row sinks and all": ((2, 2, 1, 70, 75, 16), {"window": 30, "segments": "sorted", "padding": "holes"}, "abrg"),
    "more keys": ((1, 2, 1, 37, 70, 24), {"is_causal": True}, "absg"),
    "more queries": ((1, 2, 1, 70, 37, 8), {"is_causal": True}, "absg"),
    "full": ((1, 2, 1, 53, 37, 8), {}, "absg"),
    "window": ((1, 2, 1, 70, 75, 16), {"is_causal": True, "window": 9}, "absg"),
    "wide window": ((1, 2, 1, 100, 100, 16), {"is_causal": True, "window": 50}, "absg"),
    "both ways": ((1, 2, 1, 70, 75, 16), {"window": 20}, "absg"),
    "window of one": ((1, 2, 1, 33, 33, 16), {"is_causal": True, "window": 1}, "ab"),
    "segments": ((2, 2, 1, 90, 90, 16), {"is_causal": True, "segments": "sorted"}, "absg"),
    "mixed segments": ((2, 2, 1, 50, 50, 16), {"segments": "mixed"}, "absg"),
    "holes": ((2, 2, 1, 70, 70, 16), {"is_causal": True, "padding": "holes"}, "absg"),
    "right padding": ((2, 2, 1, 70, 70, 16), {"is_causal": True, "padding": "right"}, "absg"),
    "left padding": ((2, 2, 1, 70, 70, 16), {"is_causal": True, "padding": "left"}, "absg"),
    "everything": ((2, 2, 1, 70, 75, 16), {"window": 30, "segments": "sorted", "padding": "holes"}, "absg"),
    "one query": ((1, 2, 1, 1, 40, 3), {"is_causal": True}, "absg"),
    "one key": ((1, 2, 1, 40, 1, 5), {"is_causal": True}, "absg"),
    "one of each": ((1, 1, 1, 1, 1, 1), {"is_causal": True}, "abg"),
    "no queries": ((1, 2, 1, 0, 3, 4), {"is_causal": True}, "absg"),
    "no keys": ((1, 2, 1, 3, 0, 4), {"is_causal": True}, "absg"),
}


def make_inputs(shape: tuple[int, ...], parts: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor | None]:
    batch, heads, kv_heads, queries, keys, dim = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    return {
        "query": draw(batch, heads, queries, dim, dtype=dtype),
        "key": draw(batch, kv_heads, keys, dim, dtype=dtype),
        "value": draw(batch, kv_heads, keys, dim, dtype=dtype),
        "alpha": draw(batch, heads, queries).sigmoid() if "a" in parts else None,
        "beta": 0.1 * draw(batch, heads, queries) if "b" in parts else None,
        # Large and distinct values: with a sink near 0, a dropped or wrongly scaled sink would go unnoticed.
        "sink": torch.linspace(-3, 6, heads).to(DEVICE)
        if "s" in parts
        else (draw(batch, queries, heads).mT + torch.linspace(-3, 6, heads, device=DEVICE)[:, None]) * 1.0
        if "r" in parts
        else None,
        "gate": draw(batch, heads, queries, dim, dtype=dtype).sigmoid() if "g" in parts else None,
    }


def make_visibility(shape: tuple[int, ...], options: dict[str, object], seed: int = 0) -> Visibility:
    batch, _, _, queries, keys, _ = shape
    options = dict(options)
    generator = torch.Generator().manual_seed(seed)
    kind = options.pop("segments", None)
    if kind is not None:
        ids = torch.randint(-1, 3, (batch, max(queries, keys)), generator=generator)
        ids = (ids.sort(1)[0] if kind == "sorted" else ids).to(DEVICE)
        options |= {"query_segments": ids[:, -queries:], "key_segments": ids[:, -keys:]}
    kind = options.pop("padding", None)
    if kind is not None:
        mask = torch.rand(batch, keys, generator=generator) > 0.3
        if kind != "holes":
            lengths = torch.tensor([keys - 7, keys // 3])[:, None]
            mask = torch.arange(keys)[None, :] < lengths
            mask = mask if kind == "right" else mask.flip(1)
        options["key_mask"] = mask.to(DEVICE)
    return Visibility(batch, queries, keys, DEVICE, **options)


def plain(formula):
    """A baseline of `affine_attention.testing` with the arguments of the kernels; it does not support odd addresses."""
    return lambda *, visibility, softmax_scale, **inputs: formula(
        {n: x.clone(memory_format=torch.contiguous_format) for n, x in inputs.items() if x is not None},
        visibility,
        softmax_scale,
    )


def run(function, inputs, visibility, grad_out, *, dtype=None, softmax_scale=0.3) -> dict[str, Tensor]:
    """The output and the gradients of all inputs."""
    leaves = {name: x if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    out = function(**leaves, visibility=visibility, softmax_scale=softmax_scale)
    given = {name: x for name, x in leaves.items() if x is not None}
    grads = torch.autograd.grad(out, list(given.values()), grad_out.to(out.dtype), materialize_grads=True)
    return {"out": out.detach(), **dict(zip(given, grads, strict=True))}


def check(
    inputs, visibility, *, grad_out=None, softmax_scale=0.3, others=(), function=flash_attention
) -> dict[str, Tensor]:
    """Error against fp64 at most twice that of the plain formula in the same dtype, for out and every gradient.

    The error of a single value has a high variance: `others` are more draws of the inputs, pooled with the first.
    """
    if grad_out is None:
        grad_out = torch.randn(inputs["query"].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grad_out = grad_out.to(inputs["query"].dtype)
    rows = visibility.batch * visibility.num_queries
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    results = []
    for draw in (inputs, *others):
        exact = run(reference, draw, visibility, grad_out, dtype=torch.float64, softmax_scale=softmax_scale)
        plains = [
            run(plain(formula), draw, visibility, grad_out, softmax_scale=softmax_scale)
            for formula in (naive_attention, sdpa_attention)
        ]
        results.append(run(function, draw, visibility, grad_out, softmax_scale=softmax_scale))
        for name, expected in exact.items():
            found = results[-1][name]
            assert found.shape == expected.shape
            ratio = error_ratio(
                found, [each[name] for each in plains], expected, rows if name == "sink" and expected.dim() == 1 else 1
            )
            error = float((found.double() - expected).norm())
            errors[name].append((error, error / ratio if ratio else 0.0))
            assert ratio == ratio, f"{name} is not a number"
    for name, pairs in errors.items():
        error, unit = (math.hypot(*each) for each in zip(*pairs, strict=True))
        assert error <= MAX_ERROR_RATIO * unit, f"{name}: error ratio {error / unit:.2f}"
    return results[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_output_and_every_gradient(case: str, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.float16 and case not in ("causal", "everything", "window"):
        pytest.skip("fp16 in the interpreter: three cases, for time")
    shape, options, parts = CASES[case]
    inputs, visibility = make_inputs(shape, parts, dtype), make_visibility(shape, options)
    assert why_not_fused(AttentionCall.of(**inputs, visibility=visibility, softmax_scale=0.3)) is None
    check(inputs, visibility, others=[make_inputs(shape, parts, dtype, seed) for seed in range(1, draws(shape, dtype))])


def draws(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """How many draws are pooled: the gradient of a sink and the rows of a single key have two elements.

    With one key and a sink, two nearly equal values are subtracted in one row per head: the ratio of sixteen draws
    varies from 0.8 to 2.8, that of 128 draws is 1.5.
    """
    if not ON_GPU or dtype == torch.float32:
        return 16 if math.prod(shape) == 1 else 1
    return 128 if min(shape[3:5]) == 1 else 16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_query_one_key_and_a_sink(dtype: torch.dtype) -> None:
    """The gradient of the logit is P dP - P delta, which nearly cancel: the unit of the error is their rounding.

    The baselines round other values (P or O), and with one element per tensor their error is not a usable unit.
    """
    shape, scale = (1, 1, 1, 1, 1, 1), 0.3
    visibility = make_visibility(shape, {"is_causal": True})
    grad_out = torch.ones((*shape[:2], 1, 1), device=DEVICE, dtype=dtype)
    errors: dict[str, list[float]] = defaultdict(list)
    units: dict[str, list[float]] = defaultdict(list)
    for seed in range(16):
        inputs = make_inputs(shape, "absg", dtype, seed)
        exact = run(reference, inputs, visibility, grad_out, dtype=torch.float64, softmax_scale=scale)
        found = run(flash_attention, inputs, visibility, grad_out, softmax_scale=scale)
        q, k, v, alpha, _, sink, gate = (float(x) for x in inputs.values())
        weight = 1 / (1 + math.exp(sink - scale * q * k))
        term = abs(weight * alpha * gate * v * scale)
        for name, other in (("query", k), ("key", q)):
            errors[name].append(float(found[name].double() - exact[name]))
            units[name].append(math.sqrt(2) * torch.finfo(dtype).eps / 2 * term * abs(other))
        for name in ("out", "value", "alpha", "beta", "sink", "gate"):
            errors[name].append(float(found[name].double() - exact[name]))
            units[name].append(torch.finfo(dtype).eps * (abs(float(exact[name])) + weight * abs(v)))
    for name in errors:
        ratio = math.hypot(*errors[name]) / math.hypot(*units[name])
        assert ratio <= MAX_ERROR_RATIO, f"{name}: error ratio {ratio:.2f}"


@pytest.mark.parametrize("layout", ["heads last", "packed", "last dim strided", "odd offset", "expanded heads"])
def test_any_strides(layout: str) -> None:
    if layout in ("packed", "odd offset"):
        skip_for_time()
    shape, _, parts = CASES["causal"]
    inputs = make_inputs(shape, parts, torch.float32)

    def lay_out(x: Tensor) -> Tensor:
        if layout == "heads last":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "packed":
            return torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]]
        if layout == "last dim strided":
            return x.mT.contiguous().mT
        if layout == "odd offset":
            return torch.nn.functional.pad(x, (1, 0))[..., 1:]
        return x[:, :1].expand(x.shape)

    inputs |= {name: lay_out(inputs[name]) for name in ("query", "key", "value", "gate")}
    inputs["alpha"] = inputs["alpha"].mT.contiguous().mT
    check(inputs, make_visibility(shape, {"is_causal": True}))


@pytest.mark.parametrize("first", [1, 4])
def test_rows_with_gaps_at_any_address(first: int) -> None:
    """A plan serves calls at aligned and other addresses; a copy that moves a tensor keeps its strides."""
    shape, _, _ = CASES["affine"]
    inputs, visibility = make_inputs(shape, "ab", torch.float32), make_visibility(shape, {"is_causal": True})
    (batch, heads, length), function = inputs["alpha"].shape, by_route("flash", "flash")
    with_gaps = torch.rand(batch, length, 6 + heads, device=DEVICE)
    for offset in (first, 5 - first):  # 4 floats are 16 bytes
        rows = {
            "alpha": with_gaps[..., offset : offset + heads].mT,
            "beta": with_gaps[..., :1].mT.expand(-1, heads, -1),
        }
        given = inputs | rows
        found = function(**given, visibility=visibility, softmax_scale=0.3)
        expected = reference(**given, visibility=visibility, softmax_scale=0.3)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["expanded", "transposed"])
def test_output_gradient_that_is_not_contiguous(kind: str) -> None:
    shape, options, parts = CASES["causal"]
    inputs = make_inputs(shape, parts, torch.float32)
    ones = torch.ones((), device=DEVICE).expand(inputs["query"].shape)
    check(
        inputs, make_visibility(shape, options), grad_out=ones if kind == "expanded" else inputs["query"].mT.clone().mT
    )


@pytest.mark.parametrize("parts", ["ab", "absg"])
def test_rows_that_see_no_key_are_zero(parts: str) -> None:
    shape = (2, 2, 1, 40, 40, 8)
    inputs = make_inputs(shape, parts, torch.float32)
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[0] = False
    got = check(inputs, Visibility(2, 40, 40, DEVICE, is_causal=True, key_mask=mask))
    assert all(got[name][0].abs().max() == 0 for name in got if name != "sink")


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["alpha", "beta", "gate", "sink"])
def test_rows_that_see_no_key_are_zero_whatever_their_coefficients(name: str, broken: float) -> None:
    if broken == torch.inf and name != "sink":
        skip_for_time()
    shape = (2, 2, 1, 40, 40, 8)
    inputs = make_inputs(shape, "abrg" if name == "sink" else "absg", torch.float32)
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[0, :9] = False  # the first rows of the first sequence see no key
    visibility = Visibility(2, 40, 40, DEVICE, is_causal=True, key_mask=mask)
    grad_out = torch.randn(inputs["query"].shape).to(DEVICE)
    clean = run(flash_attention, inputs, visibility, grad_out)
    coefficient = inputs[name].clone()
    coefficient[0, :, :9] = broken
    found = run(flash_attention, inputs | {name: coefficient}, visibility, grad_out)
    assert not found["out"][0, :, :9].any()
    for gradient, x in found.items():
        assert torch.equal(x, clean[gradient]), gradient


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["padding", "before the window", "other segment"])
def test_nonfinite_keys_that_no_query_sees_have_no_effect(place: str, poison: float) -> None:
    shape = (1, 2, 1, 40, 60, 8)
    inputs = make_inputs(shape, "absg", torch.float32)
    unseen = torch.zeros(1, 60, dtype=torch.bool, device=DEVICE)
    if place == "before the window":
        visibility = Visibility(1, 40, 60, DEVICE, is_causal=True, window=7)
        unseen[:, :14] = True
    elif place == "padding":
        unseen[:, ::3] = True
        visibility = Visibility(1, 40, 60, DEVICE, is_causal=True, key_mask=~unseen)
    else:
        unseen[:, 5:30] = True
        ones = torch.ones(1, 40, dtype=torch.int64, device=DEVICE)
        visibility = Visibility(1, 40, 60, DEVICE, query_segments=ones, key_segments=1 - unseen.long())
    grad_out = torch.randn(inputs["query"].shape).to(DEVICE)
    clean = run(flash_attention, inputs, visibility, grad_out)
    broken = {name: inputs[name].masked_fill(unseen[:, None, :, None], poison) for name in ("key", "value")}
    for name, x in run(flash_attention, inputs | broken, visibility, grad_out).items():
        assert torch.equal(x, clean[name]), name


def test_a_nonfinite_value_reaches_the_rows_that_see_it() -> None:
    shape = (1, 1, 1, 40, 40, 8)
    inputs = make_inputs(shape, "ab", torch.float32)
    inputs["value"][0, 0, 21] = torch.nan
    mask = torch.ones(1, 40, dtype=torch.bool, device=DEVICE)
    mask[0, 3] = False
    out = flash_attention(
        **inputs, visibility=Visibility(1, 40, 40, DEVICE, is_causal=True, key_mask=mask), softmax_scale=0.3
    )
    assert out[0, 0].isnan().all(-1).tolist() == [row >= 21 for row in range(40)]


@pytest.mark.parametrize("softmax_scale", [-0.5, 0.0])
def test_scales_that_are_not_positive(softmax_scale: float) -> None:
    shape, options, parts = CASES["window"]

    def fused(*, visibility, **given):
        return attention(**given, is_causal=True, window=visibility.window, impl="fused")

    inputs, visibility = make_inputs(shape, parts, torch.float32), make_visibility(shape, options)
    check(inputs, visibility, softmax_scale=softmax_scale, function=fused)


@pytest.mark.parametrize("names", ["absg", "abrg", ""])
def test_registration(names: str) -> None:
    shape, _, _ = CASES["sink"]
    inputs = make_inputs(shape, names, torch.float32)
    tensors = [inputs[name] for name in NAMES]
    mask = torch.ones(1, 33, dtype=torch.bool, device=DEVICE)
    rest = (None, None, mask if not names else None, True, 5 if not names else None, 0.3, False, "softmax")
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.affine_attention.forward.default, (*tensors, *rest, True), test_utils=utils)
    out, core, lse, state = torch.ops.affine_attention.forward(*tensors, *rest, True)
    arguments = (torch.ones_like(out), core if core.numel() else out, lse, state, *tensors, *rest, bool(names))
    torch.library.opcheck(torch.ops.affine_attention.backward.default, arguments, test_utils=utils)


@pytest.mark.parametrize("case", ["causal", "everything", "no keys", "row sinks and all"])
def test_the_operator_equals_the_eager_function(case: str) -> None:
    shape, options, parts = CASES[case]
    inputs, visibility = make_inputs(shape, parts, torch.float32), make_visibility(shape, options)
    grad_out = torch.randn(inputs["query"].shape).to(DEVICE)
    eager = run(flash_attention, inputs, visibility, grad_out)
    for name, x in run(by_operator, inputs, visibility, grad_out).items():
        assert torch.equal(x, eager[name]), name


@pytest.mark.parametrize(("case", "window"), [("window", 9), ("causal", None), ("affine", None), ("row sinks", None)])
def test_compiles_without_a_graph_break(case: str, window: int | None) -> None:
    shape, options, parts = CASES[case]
    inputs, visibility = make_inputs(shape, parts, torch.float32), make_visibility(shape, options)
    grad_out = torch.randn(inputs["query"].shape).to(DEVICE)

    def fused(*, visibility, **given):
        return attention(**given, is_causal=True, window=window)

    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    eager = run(flash_attention, inputs, visibility, grad_out)
    for name, x in run(compiled, inputs, visibility, grad_out).items():
        assert torch.equal(x, eager[name]), name


@pytest.mark.parametrize("weights", ["softmax", "signed", "sigmoid"])
def test_a_graph_takes_one_tensor_as_several_arguments(weights: str) -> None:
    """Packed documents have one tensor of ids; a compiler refuses an autograd function that gets one tensor twice."""
    x = make_inputs((1, 2, 2, 33, 33, 16), "", torch.float32)["query"]
    ids = torch.arange(33, device=DEVICE)[None] // 9

    def packed(x, row):
        return attention(x, x, x, alpha=row, beta=row, gate=x, segment_ids=ids, is_causal=True, weights=weights)

    results = []
    for function in (torch.compile(packed, fullgraph=True, backend="aot_eager"), packed):
        leaves = [x.clone().requires_grad_(), x[..., 0].clone().requires_grad_()]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_nothing_is_saved_without_gradients() -> None:
    shape, _, _ = CASES["sink"]
    inputs = make_inputs(shape, "ab", torch.float32)
    _, *kept = torch.ops.affine_attention.forward(
        *(inputs[name] for name in NAMES), None, None, None, True, None, 0.3, False, "softmax", False
    )
    assert all(x.numel() == 0 for x in kept)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 160, 256])
def test_every_shipped_configuration(dim: int, dtype: torch.dtype) -> None:
    shape = (2, 4, 2, 301, 301, dim)
    causal, window = (make_visibility(shape, options) for options in ({"is_causal": True}, {"window": 90}))
    padded = make_visibility(shape, {"is_causal": True, "padding": "right", "segments": "sorted"})
    for parts, visibility in (("ab", causal), ("as", causal), ("absg", window), ("absg", padded)):
        # The gradient of the sinks has four elements, so eight draws are pooled.
        first, *others = (make_inputs(shape, parts, dtype, seed) for seed in range(8 if "s" in parts else 1))
        check(first, visibility, softmax_scale=dim**-0.5, others=others)


@needs_gpu
def test_a_thousand_launches_are_bitwise_equal() -> None:
    shape = (2, 4, 2, 300, 300, 64)
    inputs, visibility = make_inputs(shape, "absg", torch.bfloat16), make_visibility(shape, {"is_causal": True})
    grad_out = torch.randn(inputs["query"].shape, device=DEVICE)
    first = run(flash_attention, inputs, visibility, grad_out)
    for _ in range(1000):
        for name, x in run(flash_attention, inputs, visibility, grad_out).items():
            assert torch.equal(x, first[name]), name


@needs_gpu
def test_offsets_beyond_32_bits() -> None:
    shape = (1, 2, 1, 300, 300, 64)
    inputs, visibility = make_inputs(shape, "absg", torch.bfloat16), make_visibility(shape, {"is_causal": True})
    far = inputs | {name: _spread(inputs[name]) for name in ("query", "key", "value")}
    grad_out = torch.randn(inputs["query"].shape, device=DEVICE)
    expected = run(flash_attention, inputs, visibility, grad_out)
    for name, x in run(flash_attention, far, visibility, grad_out).items():
        assert torch.equal(x, expected[name]), name


def _spread(x: Tensor) -> Tensor:
    """x with rows so far apart in memory that the last is beyond 2^31 elements."""
    row = 2**31 // (x.shape[2] - 2) // 8 * 8
    storage = x.new_empty((x.shape[2] - 1) * row + x.shape[1] * x.shape[3])
    return storage.as_strided(x.shape, (x.shape[3], x.shape[3], row, 1)).copy_(x)
