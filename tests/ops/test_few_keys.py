"""Gradients of rows that see a few keys beside a sink: as accurate as the formula written out."""

from __future__ import annotations

import math

import pytest
import torch

from affine_attention.ops.call import AttentionCall
from affine_attention.ops.few_keys import MAX_KEYS, has_few_keys
from affine_attention.ops.validation import check_visibility
from affine_attention.testing import MAX_ERROR_RATIO, Case, make_inputs, naive_attention, run, run_oracle

DRAWS = 12


def visibility_of(queries, keys, **visible):
    query, key = torch.zeros(2, 1, queries, 8), torch.zeros(2, 1, keys, 8)
    options = {"mask": None, "is_causal": False, "window": None, "segment_ids": None} | visible
    return check_visibility(query, key, **options)


@pytest.mark.parametrize(
    ("expected", "visible"),
    [
        (True, {"is_causal": True, "window": MAX_KEYS}),
        (False, {"is_causal": True, "window": MAX_KEYS + 1}),
        (True, {"window": 4}),
        (False, {"window": 5}),
        (False, {"is_causal": True}),
        (True, {"segment_ids": torch.arange(40).expand(2, -1) // MAX_KEYS}),
        (False, {"segment_ids": torch.arange(40).expand(2, -1) // (MAX_KEYS + 1)}),
        (True, {"mask": torch.eye(40, dtype=torch.bool).expand(2, 1, -1, -1)}),
    ],
)
def test_few_keys_are_recognised(expected, visible):
    assert has_few_keys(visibility_of(40, 40, **visible)) is expected


def test_short_and_empty_calls():
    assert has_few_keys(visibility_of(40, MAX_KEYS))
    assert has_few_keys(visibility_of(0, 3))
    assert not has_few_keys(visibility_of(0, 40, mask=torch.ones(2, 1, 0, 40, dtype=torch.bool)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, MAX_KEYS, MAX_KEYS + 1])
@pytest.mark.parametrize("sink", [-5.0, 0.0])
def test_gradients_are_as_accurate_as_the_formula_written_out(dtype, window, sink):
    """The naive formula alone is the baseline here; the kernels' errors reached five times its own."""
    own: dict[str, float] = {}
    naive: dict[str, float] = {}
    for seed in range(DRAWS):
        inputs = make_inputs(Case("sink", dtype=dtype, dim=128, seed=seed))
        inputs.tensors["sink"] = torch.full((4,), sink, dtype=dtype)
        inputs.visible["window"] = window
        truth, result, leaves = run_oracle(inputs), run(inputs, "composed"), inputs.leaves()
        grads = torch.autograd.grad(naive_attention(leaves, inputs.visible), list(leaves.values()), inputs.grad_out)
        for name, grad in zip(leaves, grads, strict=True):
            if name in ("query", "key", "value"):
                right = truth[f"grad_{name}"]
                own[name] = own.get(name, 0.0) + float((result[f"grad_{name}"].double() - right).square().sum())
                naive[name] = naive.get(name, 0.0) + float((grad.double() - right).square().sum())
    for name in own:
        ratio = math.sqrt(own[name] / naive[name])
        assert ratio <= MAX_ERROR_RATIO, f"gradient of {name}: {ratio:.2f} times the error of the formula"


@pytest.mark.parametrize("extra", ["", "row_sink"])
@pytest.mark.parametrize("visibility", ["causal+window", "causal+segments+padding", "head_mask"])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 8), (300, 6), (9, 3)])
def test_fp64_equals_the_reference(visibility, queries, keys, extra):
    inputs = make_inputs(Case("sink", visibility, queries=queries, keys=keys, dtype=torch.float64, extra=extra))
    assert has_few_keys(AttentionCall.of(
        *(inputs.tensors[name] for name in ("query", "key", "value")), softmax_scale=1.0,
        visibility=check_visibility(
            inputs.tensors["query"], inputs.tensors["key"],
            **({"mask": None, "is_causal": False, "window": None, "segment_ids": None} | inputs.visible),
        ),
    ).visibility)  # fmt: skip
    truth, result = run_oracle(inputs), run(inputs, "composed")
    for name in truth:
        torch.testing.assert_close(result[name], truth[name], rtol=1e-10, atol=1e-10)
