"""The reference against the equation written with Python loops."""

from __future__ import annotations

import math

import pytest
import torch

from affine_attention import attention, attention_weights
from affine_attention.ops.call import AttentionCall
from affine_attention.ops.reference import reference_attention, reference_weights
from affine_attention.ops.validation import check_visibility
from affine_attention.testing import Case, make_inputs


def loops(tensors, seen, scale):
    """F1 to F4 as scalar loops."""
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    batch, heads, queries, _ = query.shape
    repeats = heads // key.shape[1]
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                columns = seen[b % seen.shape[0], h % seen.shape[1], i].nonzero().flatten().tolist()
                exp = {j: math.exp(float(query[b, h, i] @ key[b, h // repeats, j]) * scale) for j in columns}
                total = sum(exp.values())
                if tensors["sink"] is not None:
                    total += math.exp(float(tensors["sink"][h]))
                for j in columns:
                    weight = exp[j] / total
                    if tensors["alpha"] is not None:
                        weight *= float(tensors["alpha"][b, h, i])
                    if tensors["beta"] is not None:
                        weight += float(tensors["beta"][b, h, i])
                    out[b, h, i] += weight * value[b, h // repeats, j]
    return out if tensors["gate"] is None else out * tensors["gate"]


@pytest.mark.parametrize("mechanism", ["softmax", "sink", "off_by_one", "gated", "affine", "affine_gated"])
@pytest.mark.parametrize("visibility", ["full", "causal", "causal+window+segments+padding", "head_mask"])
def test_equals_the_equation_in_loops(mechanism, visibility):
    inputs = make_inputs(Case(mechanism, visibility, 2, 4, 2, 5, 7, 3, torch.float64))
    rows = {name: inputs.tensors[name] for name in ("alpha", "beta", "sink", "gate")}
    query, key, value = (inputs.tensors[name] for name in ("query", "key", "value"))
    options = {"mask": None, "is_causal": False, "window": None, "segment_ids": None} | inputs.visible
    seen = check_visibility(query, key, **options)
    call = AttentionCall.of(query, key, value, **rows, visibility=seen, softmax_scale=0.7)
    out = reference_attention(call)
    torch.testing.assert_close(out, loops(inputs.tensors, seen.dense(), 0.7), rtol=1e-12, atol=1e-12)
    weights = reference_weights(call)
    ungated = loops(inputs.tensors | {"gate": None}, seen.dense(), 0.7)
    torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), ungated, rtol=1e-12, atol=1e-12)


def test_weights_times_values_is_the_output():
    inputs = make_inputs(Case("affine", "causal+window+padding", dtype=torch.float64))
    rows = {name: inputs.tensors[name] for name in ("alpha", "beta")}
    query, key, value = (inputs.tensors[name] for name in ("query", "key", "value"))
    weights = attention_weights(query, key, **rows, **inputs.visible)
    out = attention(query, key, value, **rows, **inputs.visible)
    torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), out)


def test_huge_scores_and_sinks_stay_finite():
    query = torch.full((1, 2, 1, 4), 1e4)
    key = torch.full((1, 2, 3, 4), 1e4)
    sink = torch.tensor([1e9, -1e9])
    out = attention(query, key, torch.ones_like(key), sink=sink, impl="reference")
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([0.0, 1.0]))
