"""The figures' numbers, block by block, equal the same numbers taken from dense fp64 weights."""

from __future__ import annotations

import math

import pytest
import torch

from affine_attention import attention_weights
from affine_attention.lab.inspection import metrics
from affine_attention.ops.validation import check_visibility

QUERIES = 37
EXACT = {"rtol": 1e-11, "atol": 1e-11}
RANDOM = torch.rand(2, 4, QUERIES, QUERIES, generator=torch.Generator().manual_seed(5))
VISIBLE = {
    "causal": {"is_causal": True},
    "all": {},
    "window": {"is_causal": True, "window": 6},
    "both sides": {"window": 4},
    "left padding": {"is_causal": True, "mask": torch.arange(QUERIES)[None] >= torch.tensor([[0], [9]])},
    "packed": {"is_causal": True, "segment_ids": (torch.arange(QUERIES) // 8)[None].expand(2, -1) % 3},
    "a mask for each head": {"mask": RANDOM < 0.4},
    "one mask for all": {"mask": RANDOM[:, :1] < 0.1, "is_causal": True},
}  # fmt: skip
MECHANISMS = {
    "softmax": (),
    "sink": ("sink",),
    "affine": ("alpha", "beta"),
    "affine_no_bias": ("alpha",),
    "everything": ("alpha", "beta", "sink"),
    "token_sink": ("row_sink",),
    "differential": ("difference",),
    "all parts": ("alpha", "beta", "row_sink", "difference"),
    "signed": ("weights=signed", "alpha", "beta"),
    "sigmoid": ("weights=sigmoid",),
    "softplus": ("weights=softplus", "difference", "beta"),
    "normalized": ("weights=normalized", "alpha"),
}


def make_call(mechanism="affine", keys=QUERIES, dtype=torch.float64, seed=0, **visible):
    make = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 4, QUERIES, 8, generator=make, dtype=torch.float64) * 2
    key = torch.randn(2, 2, keys, 8, generator=make, dtype=torch.float64)
    alpha = torch.rand(2, 4, QUERIES, generator=make, dtype=torch.float64)
    rows = {"alpha": alpha, "beta": (0.4 - alpha) / 20, "sink": torch.randn(4, generator=make, dtype=torch.float64)}
    rows = {name: x.to(dtype) if name in MECHANISMS[mechanism] else None for name, x in rows.items()}
    if "row_sink" in MECHANISMS[mechanism]:
        rows["sink"] = torch.randn(2, 4, QUERIES, generator=make, dtype=torch.float64).to(dtype)
    if MECHANISMS[mechanism] and "=" in MECHANISMS[mechanism][0]:
        rows["weights"] = MECHANISMS[mechanism][0].split("=")[1]
    if "difference" in MECHANISMS[mechanism]:
        rows["difference"] = torch.rand(2, 4, QUERIES, generator=make, dtype=torch.float64).to(dtype)
    return query.to(dtype), key.to(dtype), rows, visible


def visibility_of(query, key, visible):
    nothing = {"mask": None, "is_causal": False, "window": None, "segment_ids": None}
    return check_visibility(query, key, **(nothing | visible))


def dense_weights(query, key, rows, visible):
    own = {name: x for name, x in rows.items() if name != "difference"}
    weights = attention_weights(query, key, **own, **visible)
    if "difference" not in rows:
        return weights
    other = torch.stack([weights[:, 1], weights[:, 0], weights[:, 3], weights[:, 2]], 1)
    return weights - rows["difference"][..., None] * other


def truth_of(query, key, rows, visible, token_mask=None):
    """Everything from the dense weights, by the definitions in words."""
    seen = visibility_of(query, key, visible).dense().expand(2, 4, *(query.shape[2], key.shape[2]))
    weights = dense_weights(query, key, rows, visible)
    softmax = attention_weights(query, key, weights=rows.get("weights", "softmax"), **visible).abs()  # no sink
    softmax = softmax / softmax.sum(-1, keepdim=True).clamp(min=1e-300)
    counted = seen.any(-1) if token_mask is None else seen.any(-1) & token_mask[:, None]

    def entropy(share):
        return -torch.special.xlogy(share, share).sum(-1)

    absolute = weights.abs().sum(-1)
    scaled = dense_weights(query, key, rows | {"beta": None}, visible)
    first, first_softmax, sees = (torch.zeros_like(absolute) for _ in range(3))
    segments = visible.get("segment_ids")
    for b in range(2):
        for i in range(query.shape[2]):
            own = torch.ones(key.shape[2], dtype=torch.bool)
            if segments is not None:
                own = segments[b] == segments[b, i]
            mask = visible.get("mask")
            if mask is not None:
                own = own & (mask[b] if mask.dim() == 2 else mask[b].flatten(0, 1).any(0))
            at = own.nonzero()[0, 0]
            first[b, :, i] = weights[b, :, i, at]
            first_softmax[b, :, i] = scaled[b, :, i, at]
            sees[b, :, i] = seen[b, :, i, at].to(sees.dtype)
    return metrics.Rows(
        row_sum=weights.sum(-1),
        absolute_sum=absolute,
        negative_mass=(-weights.clamp(max=0).sum(-1) / absolute).nan_to_num(0.0),
        first_token=first,
        first_softmax=first_softmax,
        softmax_sum=scaled.sum(-1),
        first_uniform=sees / seen.sum(-1).clamp(min=1),
        entropy_softmax=entropy(softmax),
        entropy_weights=entropy(weights.abs() / absolute[..., None]),
        counted=counted,
    )


def measured(query, key, rows, visible, token_mask=None):
    visibility = visibility_of(query, key, visible)
    return metrics.measure_rows(
        query, key, **rows, visibility=visibility, softmax_scale=query.shape[-1] ** -0.5, token_mask=token_mask
    )


def assert_rows(mine, truth, **tolerance):
    assert torch.equal(mine.counted, truth.counted)
    for name in metrics.Rows._fields[:-1]:
        a, b = getattr(mine, name)[truth.counted], getattr(truth, name)[truth.counted]
        torch.testing.assert_close(
            a.double(), b, **tolerance, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("budget", [1, 200, 2**20])
@pytest.mark.parametrize("kind", VISIBLE)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_rows_equal_the_dense_weights(mechanism, kind, budget, monkeypatch):
    monkeypatch.setitem(metrics.BLOCK_SCORES, "cpu", budget)
    call = make_call(mechanism, **VISIBLE[kind])
    truth = truth_of(*call)
    assert_rows(measured(*call), truth, **EXACT)
    if {"beta", "difference"} & set(MECHANISMS[mechanism]):
        assert (truth.negative_mass > 0.01).any(), "there is a negative mass to be found"


def test_padding_is_not_counted():
    tokens = torch.arange(QUERIES)[None] < torch.tensor([[QUERIES], [11]])
    call = make_call("everything", is_causal=True, mask=tokens)
    rows = measured(*call, token_mask=tokens)
    assert rows.counted.sum((1, 2)).tolist() == [4 * QUERIES, 4 * 11]
    assert_rows(rows, truth_of(*call, token_mask=tokens), **EXACT)


@pytest.mark.parametrize("keys", [60, 20])
def test_more_or_fewer_keys_than_queries(keys):
    call = make_call("everything", keys=keys, is_causal=True)
    rows = measured(*call)
    assert_rows(rows, truth_of(*call), **EXACT)
    assert int(rows.counted[0, 0].sum()) == min(keys, QUERIES)


def test_rows_add_up_as_the_formula_says():
    query, key, rows, visible = make_call("everything", is_causal=True)
    found = measured(query, key, rows, visible)
    scores = (query @ key.repeat_interleave(2, 1).mT * 8**-0.5).masked_fill(
        torch.ones(QUERIES, QUERIES).triu(1).bool(), -torch.inf
    )
    lse = scores.logsumexp(-1)
    kept = 1 - torch.exp(rows["sink"][:, None] - torch.logaddexp(lse, rows["sink"][:, None].expand_as(lse)))
    seen = torch.arange(1, QUERIES + 1)
    torch.testing.assert_close(found.row_sum, rows["alpha"] * kept + seen * rows["beta"], **EXACT)


def test_softmax_has_the_expected_statistics():
    rows = measured(*make_call("softmax", is_causal=True))
    torch.testing.assert_close(rows.row_sum, torch.ones_like(rows.row_sum), **EXACT)
    assert not rows.negative_mass.any()
    assert torch.equal(rows.entropy_softmax, rows.entropy_weights)
    assert rows.entropy_softmax[..., 0].abs().max() < 1e-12, "the first query sees only itself"


def test_a_head_of_zeros_has_no_entropy_of_weights_and_a_uniform_one_has_the_most():
    query, key, rows, visible = make_call("affine", is_causal=True)
    rows["alpha"] = torch.zeros_like(rows["alpha"])
    rows["beta"] = torch.zeros_like(rows["beta"])
    rows["beta"][:, 1] = -0.01
    found = measured(query, key, rows, visible)
    assert found.entropy_weights[:, 0].isnan().all()
    assert not found.negative_mass[:, 0].any()
    uniform = torch.arange(1, QUERIES + 1).double().log().expand(2, -1)
    torch.testing.assert_close(found.entropy_weights[:, 1], uniform, **EXACT)
    torch.testing.assert_close(found.negative_mass[:, 1], torch.ones(2, QUERIES).double(), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_are_measured_in_fp32(dtype):
    query, key, rows, visible = make_call("everything", dtype=torch.float32, is_causal=True)
    query, key = query.to(dtype), key.to(dtype)
    found = measured(query, key, rows, visible)
    assert found.row_sum.dtype == torch.float32
    exact = {name: x.double() for name, x in rows.items()}
    assert_rows(found, truth_of(query.double(), key.double(), exact, visible), rtol=2e-5, atol=2e-6)


def test_large_scores_do_not_overflow():
    query, key, rows, visible = make_call("everything", dtype=torch.float32, is_causal=True)
    found = measured(query * 1e3, key * 1e3, rows, visible)
    assert all(x.isfinite().all() for x in found[:-1])


@pytest.mark.parametrize("kind", VISIBLE)
def test_mean_logits_equal_the_scores(kind):
    query, key, _, visible = make_call(**VISIBLE[kind])
    visibility = visibility_of(query, key, visible)
    tokens = torch.rand(2, QUERIES, generator=torch.Generator().manual_seed(3)) < 0.7
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    seen = visibility.dense().expand_as(scores)
    for token_mask in (None, tokens):
        chosen = seen if token_mask is None else seen & token_mask[:, None, :, None]
        sums, counts = metrics.logit_sums(query, key, visibility, 0.3, token_mask)
        assert counts.tolist() == chosen.sum((0, 2, 3)).tolist()
        torch.testing.assert_close(sums, (scores * chosen).sum((0, 2, 3)), **EXACT)


def test_mean_logits_of_low_precision_inputs_are_summed_in_fp64():
    query, key, _, visible = make_call(dtype=torch.bfloat16, is_causal=True)
    visibility = visibility_of(query, key, visible)
    mine, _ = metrics.logit_sums(query, key, visibility, 0.3)
    truth, _ = metrics.logit_sums(query.double(), key.double(), visibility, 0.3)
    assert torch.equal(mine, truth)


@pytest.mark.parametrize("kind", VISIBLE)
@pytest.mark.parametrize("mechanism", ["softmax", "everything", "all parts", "signed", "softplus"])
def test_a_map_is_the_corner_of_the_weights(mechanism, kind, monkeypatch):
    query, key, rows, visible = make_call(mechanism, **VISIBLE[kind])
    truth = dense_weights(query, key, rows, visible)[0, :, :10, :10]
    visibility = visibility_of(query, key, visible)
    for budget in (100, 2**20):
        monkeypatch.setitem(metrics.BLOCK_SCORES, "cpu", budget)
        mine = metrics.weight_map(query, key, 10, **rows, visibility=visibility, softmax_scale=8**-0.5)
        torch.testing.assert_close(mine, truth, **EXACT)
    whole = metrics.weight_map(query, key, 1000, **rows, visibility=visibility, softmax_scale=8**-0.5)
    assert whole.shape == (4, QUERIES, QUERIES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", VISIBLE)
def test_a_gpu_gives_the_same_results(kind):
    query, key, rows, visible = make_call("everything", **VISIBLE[kind])
    truth = measured(query, key, rows, visible)
    there = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in visible.items()}
    moved = query.cuda(), key.cuda(), {name: x.cuda() for name, x in rows.items()}, there
    found = measured(*moved)
    assert found.row_sum.is_cuda
    assert_rows(metrics.Rows._make(x.cpu() for x in found), truth, **EXACT)
    visibility = visibility_of(moved[0], moved[1], there)
    sums, _ = metrics.logit_sums(moved[0], moved[1], visibility, 0.3)
    torch.testing.assert_close(sums.cpu(), metrics.logit_sums(query, key, visibility_of(query, key, visible), 0.3)[0])
    weights = metrics.weight_map(*moved[:2], 10, **moved[2], visibility=visibility, softmax_scale=8**-0.5)
    torch.testing.assert_close(weights.cpu(), attention_weights(query, key, **rows, **visible)[0, :, :10, :10], **EXACT)


def test_shares_count_real_tokens_only():
    alpha = torch.tensor([[0.0, 0.5, 1.0, 1.0], [0.2, 0.3, 0.9999, 0.0]])[None]
    tokens = torch.tensor([[True, True, True, False]])
    sums, counts = metrics.share_sums(metrics.is_saturated(alpha), tokens)
    assert (sums.tolist(), counts.tolist()) == ([2, 0], [3, 3])
    gate = torch.tensor([0.0, 0.009, 0.5, 0.991]).view(1, 1, 2, 2)
    sums, counts = metrics.share_sums(metrics.is_gate_saturated(gate))
    assert (sums.tolist(), counts.tolist()) == ([3], [4])
    total, _ = metrics.share_sums(gate)
    assert total.item() == pytest.approx(1.5)


def test_numbers_that_json_lacks_become_none():
    assert metrics.finite_or_none([1.0, [math.nan, -math.inf], 2.5]) == [1.0, [None, None], 2.5]
