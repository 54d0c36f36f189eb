"""Test inputs, an fp64 oracle and a derived tolerance, shared by the tests and the benchmarks.

An implementation is correct if its error against fp64 is at most `MAX_ERROR_RATIO` times that of plain PyTorch in the
same dtype, for the output and for every gradient, and the error of its worst row at most `MAX_ROW_ERROR_RATIO` times.
Plain PyTorch is the straightforward formula with `torch.softmax` or with `F.scaled_dot_product_attention`, whichever
has the larger error: neither is more accurate everywhere.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .nn import PRESETS, Mechanism
from .ops import attention
from .ops.call import sink_by_row
from .ops.dtypes import row_dtype
from .ops.finish import NORM_EPS
from .ops.validation import check_visibility
from .ops.visibility import Visibility

MAX_ERROR_RATIO = 2.0
MAX_ROW_ERROR_RATIO = 3.0  # a maximum varies more than a norm
ENOUGH_ROWS, ENOUGH_SINKS, MOST_REPEATS = 2048, 16, 16
ENOUGH_ROWS_FOR_A_MAXIMUM = 24576

VISIBILITIES = ("full", "causal", "window", "segments", "padding", "mask", "head_mask")
EXTRAS = ("row_sink", "exclusion", "norm", "head_norm")
COEFFICIENTS = ("alpha", "beta", "sink", "gate", "exclusion", "norm_weight")
LAYOUTS = ("plain", "transposed", "fused_qkv", "strided", "expanded")


@dataclass(frozen=True)
class Case:
    """One call of the operator. `visibility` combines kinds with "+", as in "causal+window+padding".

    `extra` adds parts to the mechanism, combined with "+" as well: "row_sink" (a sink of each row), "exclusion" (of the
    own value), "norm" (one weight for all heads) or "head_norm" (a weight for each head).
    """

    mechanism: str = "affine"
    visibility: str = "causal"
    batch: int = 2
    heads: int = 4
    groups: int = 2
    queries: int = 65
    keys: int = 65
    dim: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "plain"
    device: str = "cpu"
    seed: int = 0
    extra: str = ""

    def __str__(self) -> str:
        extra = f"+{self.extra}" if self.extra else ""
        return (
            f"{self.mechanism}{extra}-{self.visibility}-B{self.batch}-H{self.heads}_{self.groups}-T{self.queries}_{self.keys}-"
            f"D{self.dim}-{str(self.dtype).removeprefix('torch.')}-{self.layout}"
        )


@dataclass(frozen=True)
class Inputs:
    """Tensors of a call by name (None if the mechanism has none), its visibility and a gradient of the output."""

    tensors: dict[str, Tensor | None]
    visible: dict[str, Any]
    grad_out: Tensor = field(repr=False)

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype."""
        tensors = {name: None if x is None else x.detach().to(dtype) for name, x in self.tensors.items()}
        return replace(self, tensors=tensors, grad_out=self.grad_out.to(dtype))

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that are not None, detached with requires_grad, in their memory layout."""
        return {name: x.detach().requires_grad_() for name, x in self.tensors.items() if x is not None}


GRID: dict[str, tuple[Any, ...]] = {
    "mechanism": tuple(PRESETS)[:8],  # the others differ in where the coefficients of the operator come from
    "visibility": (
        "full", "causal", "window", "segments", "padding", "mask", "head_mask", "causal+window", "causal+segments",
        "causal+padding", "causal+head_mask", "segments+padding", "causal+window+segments+padding",
    ),
    "heads_groups": ((4, 4), (4, 2), (4, 1)),
    "length": (0, 1, 7, 63, 65, 129, 1000),
    "dim": (16, 40, 64, 96, 128),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "layout": LAYOUTS,
}  # fmt: skip


# Combinations of three values that were above the bar: many heads in one group, half precision, a constant gradient.
HARD_CASES = (
    Case("sink", "padding", 2, 16, 1, 129, 129, 64, torch.float16, "expanded"),
    Case("sink", "full", 2, 8, 1, 129, 129, 64, torch.float16, "expanded"),
    Case("sink", "causal+segments", 2, 4, 1, 129, 129, 64, torch.float16, "expanded"),
    Case("sink", "padding", 2, 16, 1, 300, 300, 64, torch.bfloat16, "expanded"),
)


def grid_cases(count: int = 0, seed: int = 0, device: str = "cpu") -> list[Case]:
    """Cases that cover every pair of values of two axes of GRID (pairwise testing), random ones, and HARD_CASES.

    There are `count` of them, or as many as the pairs need.
    """
    draw = random.Random(seed)
    axes = list(GRID)
    waiting = {((a, x), (b, y)) for i, a in enumerate(axes) for b in axes[i + 1 :] for x in GRID[a] for y in GRID[b]}
    queue = sorted(waiting, key=str)
    draw.shuffle(queue)
    cases: list[Case] = []
    while waiting or len(cases) < count - len(HARD_CASES):
        point = {axis: draw.choice(values) for axis, values in GRID.items()}
        # Add as many missing pairs as are compatible.
        fixed: dict[str, Any] = {}
        for pair in queue:
            if pair in waiting and all(fixed.get(axis, value) == value for axis, value in pair):
                fixed |= dict(pair)
        point |= fixed
        waiting -= {((a, point[a]), (b, point[b])) for i, a in enumerate(axes) for b in axes[i + 1 :]}
        cases.append(_case_of(point, len(cases), device))
    return cases + [replace(case, device=device) for case in HARD_CASES]


def _case_of(point: dict[str, Any], seed: int, device: str) -> Case:
    heads, groups = point["heads_groups"]
    length = point["length"]
    return Case(
        point["mechanism"], point["visibility"], 1 if length > 500 else 2, heads, groups, length, length, point["dim"],
        point["dtype"], point["layout"], device, seed,
    )  # fmt: skip


def make_inputs(case: Case) -> Inputs:
    """Random inputs: alpha in [0, 1], a bias as large as the softmax part, large and distinct sinks."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shape_q = (case.batch, case.heads, case.queries, case.dim)
    shape_k = (case.batch, case.groups, case.keys, case.dim)
    mechanism = Mechanism.named(case.mechanism)
    alpha = torch.rand(shape_q[:3], generator=generator, dtype=torch.float64)
    beta = (0.5 - alpha) * normal(*shape_q[:3]).abs() / math.sqrt(max(case.keys, 1))
    # With a sink of zero, an ignored sink could go unnoticed in bf16; these take from almost none to almost all mass.
    sink = torch.linspace(-2.0, 5.0, case.heads, dtype=torch.float64) if mechanism.sink == "learned" else None
    if mechanism.sink == "zero":
        sink = torch.zeros(case.heads, dtype=torch.float64)
    tensors: dict[str, Tensor | None] = {
        "query": normal(*shape_q),
        "key": normal(*shape_k),
        "value": normal(*shape_k) + 0.2,
        "alpha": alpha if mechanism.has_alpha else None,
        "beta": beta if mechanism.bias else None,
        "sink": sink,
        "gate": torch.sigmoid(normal(*shape_q)) if mechanism.gate else None,
    }
    grad_out = normal(*shape_q)
    for part in filter(None, case.extra.split("+")):
        if part == "row_sink":
            tensors["sink"] = torch.linspace(-2.0, 5.0, case.heads, dtype=torch.float64)[:, None] + normal(*shape_q[:3])
        elif part == "exclusion":
            tensors["exclusion"] = 0.9 + 0.3 * normal(*shape_q[:3])
        elif part in ("norm", "head_norm"):
            # The norm multiplies gradients by the inverse of a small output; this keeps those of beta below 65504.
            weight = normal(*((case.dim,) if part == "norm" else (case.heads, case.dim)))
            tensors["norm_weight"] = (1 + 0.3 * weight) / 64
        else:
            raise ValueError(f"extra must combine {', '.join(EXTRAS)} with '+', got {part!r}")
    visible = _make_visibility(case, generator)
    cast = {name: None if x is None else x.to(case.dtype).to(case.device) for name, x in tensors.items()}
    visible = {name: _to_device(x, case.device) for name, x in visible.items()}
    inputs = Inputs(cast, visible, grad_out.to(case.dtype).to(case.device))
    return _lay_out(inputs, case)


def _to_device(x: Any, device: str) -> Any:
    if isinstance(x, tuple):
        return tuple(part.to(device) for part in x)
    return x.to(device) if isinstance(x, Tensor) else x


def _make_visibility(case: Case, generator: torch.Generator) -> dict[str, Any]:
    visible: dict[str, Any] = {}
    batch, queries, keys = case.batch, case.queries, case.keys
    for kind in case.visibility.split("+"):
        if kind == "causal":
            visible["is_causal"] = True
        elif kind == "window":
            visible["window"] = max(1, keys // 3)
        elif kind == "segments":
            # Documents of unequal length; the queries are the last T positions.
            cuts = torch.rand((batch, max(queries, keys)), generator=generator) < 0.1
            ids = cuts.long().cumsum(-1)
            visible["segment_ids"] = (ids[:, ids.shape[1] - queries :], ids[:, ids.shape[1] - keys :])
        elif kind == "padding":
            lengths = torch.randint(0, keys + 1, (batch, 1), generator=generator)
            visible["mask"] = torch.arange(keys)[None] >= lengths  # left padding, including rows without real keys
        elif kind == "mask":
            visible["mask"] = torch.rand((batch, 1, queries, keys), generator=generator) < 0.7
        elif kind == "head_mask":
            visible["mask"] = torch.rand((batch, case.heads, queries, keys), generator=generator) < 0.7
        elif kind != "full":
            raise ValueError(f"visibility must combine {', '.join(VISIBILITIES)} with '+', got {kind!r}")
    return visible


def _lay_out(inputs: Inputs, case: Case) -> Inputs:
    """The same values in memory layouts that occur in practice."""
    tensors, grad_out = dict(inputs.tensors), inputs.grad_out
    query, key, value = (inputs.tensors[name] for name in ("query", "key", "value"))
    assert query is not None
    assert key is not None
    assert value is not None
    if case.layout == "transposed":  # [B, T, H, D] in memory
        tensors |= {
            name: x.transpose(1, 2).contiguous().transpose(1, 2) if x is not None and x.dim() == 4 else x
            for name, x in tensors.items()
        }
        grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    elif case.layout == "fused_qkv":  # slices of one projection; needs T = S
        fused = torch.cat([query, key, value], dim=1).transpose(1, 2).contiguous().transpose(1, 2)
        parts = fused.split([query.shape[1], key.shape[1], value.shape[1]], dim=1)
        tensors |= dict(zip(("query", "key", "value"), parts, strict=True))
    elif case.layout == "strided":  # every second element of a larger tensor, also in the last dim
        tensors |= {
            name: torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
            for name, x in tensors.items()
            if x is not None and x.dim() == 4
        }
    elif case.layout == "expanded":  # one key-value head expanded to all, and an expanded gradient like that of .sum()
        tensors |= {"key": key[:, :1].expand_as(key), "value": value[:, :1].expand_as(value)}
        grad_out = torch.ones((), dtype=grad_out.dtype, device=grad_out.device).expand_as(grad_out)
    elif case.layout != "plain":
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {case.layout!r}")
    return replace(inputs, tensors=tensors, grad_out=grad_out)


def run(inputs: Inputs, impl: str = "auto") -> dict[str, Tensor]:
    """The output ("out") and the gradients of all tensors, by name."""
    leaves = inputs.leaves()
    arguments: dict[str, Any] = {**leaves, **inputs.visible}
    out = attention(**arguments, impl=impl)
    return _with_gradients(out, leaves, inputs.grad_out)


def run_oracle(inputs: Inputs) -> dict[str, Tensor]:
    """`run` in fp64 with the reference implementation: the ground truth."""
    return run(inputs.to(torch.float64), impl="reference")


def run_plain(inputs: Inputs) -> list[dict[str, Tensor]]:
    """`run` with two plain PyTorch implementations in the dtype of the inputs: the baseline of the tolerance."""
    results = []
    for formula in (naive_attention, sdpa_attention):
        leaves = inputs.leaves()
        results.append(_with_gradients(formula(leaves, inputs.visible), leaves, inputs.grad_out))
    return results


def naive_attention(
    leaves: dict[str, Tensor], visible: dict[str, Any] | Visibility, softmax_scale: float | None = None
) -> Tensor:
    """[alpha softmax(Q K^T / sqrt(d)) + beta] V as in the paper, with T x S weights in the dtype of query."""
    query, key, value, seen = _plain_inputs(leaves, visible)
    rows = {name: leaves[name].to(query.dtype) for name in COEFFICIENTS if name in leaves}
    scale = 1 / math.sqrt(query.shape[-1]) if softmax_scale is None else softmax_scale
    scores = (query @ key.mT * scale).masked_fill(~seen, -torch.inf)
    if "sink" in rows:
        sink = sink_by_row(rows["sink"])[..., None].expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores.masked_fill(~seen.any(-1, keepdim=True), 0), -1)
    if "alpha" in rows:
        weights = rows["alpha"][..., None] * weights
    if "beta" in rows:
        weights = weights + rows["beta"][..., None]
    return _plain_finish(weights.masked_fill(~seen, 0) @ value, value, rows, seen)


def sdpa_attention(
    leaves: dict[str, Tensor], visible: dict[str, Any] | Visibility, softmax_scale: float | None = None
) -> Tensor:
    """The same with PyTorch's SDPA for the softmax part; a sink is an additional zero key with a bias."""
    query, key, value, seen = _plain_inputs(leaves, visible)
    rows = {name: leaves[name].to(query.dtype) for name in COEFFICIENTS if name in leaves}
    batch, heads, queries, _ = query.shape
    bias = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, -torch.inf)
    bias = bias.expand(batch, heads, queries, key.shape[2])
    softmax_key, softmax_value = key, value
    if "sink" in rows:
        softmax_key, softmax_value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
        sink = sink_by_row(rows["sink"])[..., None].expand(batch, heads, queries, 1)
        bias = torch.cat([bias, sink], -1)
    else:
        bias = bias.masked_fill(~seen.any(-1, keepdim=True), 0)
    if queries and softmax_key.shape[2]:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, softmax_key, softmax_value, attn_mask=bias, scale=softmax_scale
        )
    else:
        out = query * 0  # the kernel fails for empty tensors
    out = out.masked_fill(~seen.any(-1, keepdim=True), 0)
    if "alpha" in rows:
        out = rows["alpha"][..., None] * out
    if "beta" in rows:
        out = out + rows["beta"][..., None] * (seen.to(query.dtype) @ value)
    return _plain_finish(out, value, rows, seen)


def _plain_finish(out: Tensor, value: Tensor, rows: dict[str, Tensor], seen: Tensor) -> Tensor:
    """Exclusion, norm and gate of the output, in the dtype of the output; as models of transformers do it."""
    if "exclusion" in rows:
        before = max(out.shape[2] - value.shape[2], 0)
        own = torch.nn.functional.pad(value, (0, 0, before, 0))[:, :, before + value.shape[2] - out.shape[2] :]
        sees_own = torch.nn.functional.pad(seen, (before, 0)).diagonal(seen.shape[3] + before - seen.shape[2], -2, -1)
        own = own.masked_fill(~sees_own[..., None], 0)
        length = torch.linalg.vector_norm(own, dim=-1, keepdim=True)
        direction = own / length.masked_fill(length == 0, 1)
        out = out - rows["exclusion"][..., None] * (out * direction).sum(-1, keepdim=True) * direction
    if "norm_weight" in rows:
        wide = out.to(row_dtype(out.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        weight = rows["norm_weight"]
        out = normed.to(out.dtype) * (weight if weight.dim() == 1 else weight[:, None])
    return rows["gate"] * out if "gate" in rows else out


def _plain_inputs(
    leaves: dict[str, Tensor], visible: dict[str, Any] | Visibility
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key and value with repeated heads, and the dense mask."""
    query, key, value = leaves["query"], leaves["key"], leaves["value"]
    if not isinstance(visible, Visibility):
        options = {"mask": None, "is_causal": False, "window": None, "segment_ids": None} | visible
        visible = check_visibility(query, key, **options)
    seen = visible.dense()
    repeats = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), seen


def _with_gradients(out: Tensor, leaves: dict[str, Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out, materialize_grads=True)
    return {"out": out.detach(), **{f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}}


class Accuracy(NamedTuple):
    """Errors against fp64 divided by those of plain PyTorch, by tensor: the output and every gradient.

    Attributes:
        norm: of the L2 norm of the whole tensor; at most MAX_ERROR_RATIO.
        worst_row: of the largest L2 norm of one row (a vector of D elements, or one element of a smaller tensor); at
            most MAX_ROW_ERROR_RATIO. A few wrong rows among many hardly change the norm of the whole tensor.
    """

    norm: dict[str, float]
    worst_row: dict[str, float]


def accuracy(case: Case, impl: str = "auto") -> Accuracy:
    """Error of the output and every gradient against fp64, divided by that of plain PyTorch.

    The errors of a few numbers have a high variance, so small cases are repeated with other seeds: squared norms are
    summed, and the worst row is that of all repeats. A maximum varies most, so a case whose worst row is above its bar
    is measured again with more repeats. If plain PyTorch is exact (one key: a gradient of 0), the unit is the
    resolution of the dtypes.
    """
    repeats = _repeats(case)
    found = _accuracy(case, impl, repeats)
    more = ENOUGH_ROWS_FOR_A_MAXIMUM // max(case.batch * case.heads * case.queries, 1)
    if repeats < more and max(found.worst_row.values(), default=0.0) > MAX_ROW_ERROR_RATIO:
        return _accuracy(case, impl, more)
    return found


def _accuracy(case: Case, impl: str, repeats: int) -> Accuracy:
    own: dict[str, float] = defaultdict(float)
    own_row: dict[str, float] = defaultdict(float)
    units: dict[str, list[float]] = {}
    row_units: dict[str, list[float]] = {}
    for repeat in range(repeats):
        inputs = make_inputs(replace(case, seed=case.seed + 1000003 * repeat))
        result, oracle = run(inputs, impl), run_oracle(inputs)
        plain = run_plain(inputs)
        for name, truth in oracle.items():
            if truth.numel():
                # Each element of a sink's gradient is a sum over all rows, whose rounding errors are not averaged out.
                # So is each of a norm's weight, over all heads too if they share it.
                terms = max(case.batch * case.queries, 1) if truth.dim() <= 2 else 1
                terms *= case.heads if name == "grad_norm_weight" and truth.dim() == 1 else 1
                found = [_distance(each[name], truth) for each in plain]
                found.append(_resolution(truth, case.dtype, terms))
                own[name] += _distance(result[name], truth) ** 2
                units[name] = [a + b**2 for a, b in zip(units.get(name, [0.0] * 3), found, strict=True)]
                rows = [_worst_row(each[name], truth) for each in plain]
                rows.append(_row_resolution(truth, case.dtype, terms))
                worst = _worst_row(result[name], truth)
                if math.isnan(worst) or worst > own_row[name]:  # a NaN stays: no number is larger
                    own_row[name] = worst
                row_units[name] = [max(a, b) for a, b in zip(row_units.get(name, [0.0] * 3), rows, strict=True)]
    return Accuracy(
        {name: math.sqrt(own[name] / max(units[name])) for name in units},
        {name: own_row[name] / max(row_units[name]) for name in row_units},
    )


def error_ratios(case: Case, impl: str = "auto") -> dict[str, float]:
    """`accuracy(case, impl).norm`."""
    return accuracy(case, impl).norm


def _repeats(case: Case) -> int:
    """Number of seeds for a low variance of the error: enough rows, and enough elements of the sink's gradient."""
    rows = case.batch * case.heads * case.queries
    if not rows:
        return 1
    repeats = ENOUGH_ROWS // rows
    if Mechanism.named(case.mechanism).sink is not None:
        repeats = max(repeats, ENOUGH_SINKS // case.heads)
    return min(max(repeats, 1), MOST_REPEATS)


def error_ratio(result: Tensor, plain: list[Tensor], truth: Tensor, terms: int = 1) -> float:
    """Error of a tensor divided by that of plain PyTorch; each element is a sum of `terms` numbers of order 1."""
    if not truth.numel():
        return 0.0
    return _distance(result, truth) / max(
        *(_distance(x, truth) for x in plain), _resolution(truth, result.dtype, max(terms, 1))
    )


def _distance(x: Tensor, truth: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double() - truth))


def _worst_row(x: Tensor, truth: Tensor) -> float:
    """The largest error of a row: of the last dimension of a 4-dimensional tensor, of one element otherwise."""
    error = x.double() - truth
    return float((torch.linalg.vector_norm(error, dim=-1) if error.dim() == 4 else error.abs()).max())


def _row_resolution(truth: Tensor, dtype: torch.dtype, terms: int) -> float:
    """`_resolution` of the row with the largest norm."""
    is_row = truth.dim() == 4
    largest = float((torch.linalg.vector_norm(truth, dim=-1) if is_row else truth.abs()).max())
    elements = truth.shape[-1] if is_row else 1
    return largest * torch.finfo(dtype).eps / 2 + math.sqrt(elements * terms) * torch.finfo(row_dtype(dtype)).eps


def _resolution(truth: Tensor, dtype: torch.dtype, terms: int) -> float:
    """Half an ulp of the result, plus one ulp of each summed fp32 (or fp64) term of order 1."""
    rounding = float(torch.linalg.vector_norm(truth)) * torch.finfo(dtype).eps / 2
    return rounding + math.sqrt(truth.numel() * terms) * torch.finfo(row_dtype(dtype)).eps
