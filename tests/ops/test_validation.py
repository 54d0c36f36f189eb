"""Invalid arguments raise errors that name the argument, the rule, the value and a fix."""

from __future__ import annotations

import warnings

import pytest
import torch

from affine_attention import attention, attention_weights, decode_attention, explain
from affine_attention.testing import Case, make_inputs

GOOD = {name: x for name, x in make_inputs(Case("affine_gated")).tensors.items() if x is not None}
GOOD["sink"] = torch.zeros(4)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch warns that nested tensors are a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(2, 65, 16), torch.ones(2, 60, 16)])
    JAGGED = torch.nested.nested_tensor([torch.ones(4, 65, 16), torch.ones(3, 65, 16)], layout=torch.jagged)

BAD = [
    ({"query": "text"}, TypeError, "query must be a tensor [B, H, T, D], got str"),
    ({"query": torch.ones(2, 4, 65)}, ValueError, "query must have 4 dimensions [B, H, T, D], got 3: [2, 4, 65]"),
    ({"query": torch.ones(2, 4, 65, 16).int()}, TypeError, "query must be a floating-point tensor, got int32"),
    (
        {"query": torch.ones(2, 4, 65, 16, dtype=torch.float8_e4m3fn)},
        TypeError,
        "float64, float32, bfloat16 or float16",
    ),
    ({"key": torch.ones(3, 2, 65, 16)}, ValueError, "key must have shape [B, G, S, D] = [2, G, S, 16]"),
    ({"key": torch.ones(2, 2, 65, 8)}, ValueError, "got [2, 2, 65, 8]"),
    ({"key": torch.ones(2, 3, 65, 16), "value": torch.ones(2, 3, 65, 16)}, ValueError, "multiple of key heads"),
    ({"key": torch.ones(2, 0, 65, 16), "value": torch.ones(2, 0, 65, 16)}, ValueError, "G = 0"),
    ({"key": torch.ones(2, 2, 65, 16).double()}, TypeError, "dtype of query (float32), got float64"),
    ({"value": torch.ones(2, 2, 64, 16)}, ValueError, "value must have the shape of key [2, 2, 65, 16]"),
    ({"value": torch.ones(2, 2, 65, 16, device="meta")}, ValueError, "value must be on the device of query (cpu)"),
    ({"alpha": torch.ones(2, 65, 4)}, ValueError, "alpha must have shape [B, H, T] = [2, 4, 65], got [2, 65, 4]"),
    ({"beta": torch.ones(2, 4, 65).long()}, TypeError, "beta must be a floating-point tensor, got int64"),
    ({"beta": torch.ones(2, 4, 65).half()}, TypeError, "beta must be float32, float64 or the dtype of query"),
    ({"sink": torch.ones(2)}, ValueError, "sink must have shape [H] = [4] or [B, H, T] = [2, 4, 65], got [2]"),
    ({"sink": torch.ones(2, 65, 4)}, ValueError, "[H] = [4] or [B, H, T] = [2, 4, 65], got [2, 65, 4]"),
    ({"sink": torch.ones(2, 4)}, ValueError, "sink must have 1 or 3 dimensions [H] or [B, H, T], got 2: [2, 4]"),
    ({"sink": 0.0}, TypeError, "sink must be a tensor [H] or [B, H, T], got float"),
    ({"gate": torch.ones(2, 4, 65, 8)}, ValueError, "gate must have shape [B, H, T, D] = [2, 4, 65, 16]"),
    ({"gate": torch.ones(2, 4, 65)}, ValueError, "gate must have 4 dimensions"),
    ({"mask": torch.ones(2, 65)}, TypeError, "mask must be boolean"),
    ({"mask": torch.ones(2, 64).bool()}, ValueError, "[B, S] = [2, 65] or [B, 1|H, T, S] = [2, 1|4, 65, 65]"),
    ({"mask": torch.ones(65, 65).bool()}, ValueError, "got [65, 65]"),
    ({"mask": [True]}, TypeError, "mask must be a boolean tensor"),
    ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
    ({"window": 0}, ValueError, "window must be at least 1"),
    ({"window": -3}, ValueError, "got -3"),
    ({"window": 2.5}, TypeError, "window must be an int or None, got 2.5"),
    ({"window": True}, TypeError, "window must be an int or None, got True"),
    ({"segment_ids": torch.zeros(2, 65)}, TypeError, "segment_ids must be integers"),
    ({"segment_ids": torch.zeros(2, 64).long()}, ValueError, "segment_ids must have shape [B, T] = [2, 65]"),
    ({"segment_ids": "docs"}, TypeError, "segment_ids must be a tensor [B, T] or a pair"),
    ({"segment_ids": (torch.zeros(2, 65).long(), None)}, TypeError, "segment_ids must hold tensors, got NoneType"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite, got nan"),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a number or None"),
    ({"impl": "compsed"}, ValueError, "did you mean 'composed'?"),
    ({"impl": None}, ValueError, "impl must be one of"),
    ({"impl": ["fused"]}, ValueError, "impl must be one of"),
    ({"nonnegative_alpha": 1}, TypeError, "nonnegative_alpha must be True or False, got 1"),
    ({"nonnegative_alpha": []}, TypeError, "nonnegative_alpha must be True or False, got []"),
    ({"softmax_scale": 10**400}, ValueError, "softmax_scale must be finite, got an integer of 1329 bits"),
    ({"softmax_scale": -(10**5000)}, ValueError, "softmax_scale must be finite"),
    ({"softmax_scale": True}, TypeError, "softmax_scale must be a number or None"),
    ({"window": -(10**5000)}, ValueError, "window must be at least 1"),
    ({"segment_ids": torch.zeros(2, 65, dtype=torch.uint32)}, TypeError, "got uint32; convert them with .long()"),
    (
        {"query": torch.ones(2, 4, 65, 16).to_sparse()},
        TypeError,
        "query must be a dense tensor, got a sparse_coo tensor",
    ),
    ({"key": torch.ones(2, 2, 65, 16).to_mkldnn()}, TypeError, "key must be a dense tensor, got a mkldnn tensor"),
    ({"value": NESTED}, TypeError, "value must be a dense tensor, got a nested tensor"),
    ({"query": JAGGED}, TypeError, "query must be a dense tensor, got a nested tensor"),
    ({"alpha": torch.ones(2, 4, 65).to_sparse()}, TypeError, "convert it with alpha.to_dense()"),
    ({"mask": torch.ones(2, 65).bool().to_sparse()}, TypeError, "mask must be a dense tensor, got a sparse_coo tensor"),
    ({"segment_ids": torch.ones(2, 65).long().to_sparse()}, TypeError, "segment_ids must be a dense tensor"),
]


@pytest.mark.parametrize(("changes", "error", "words"), BAD, ids=[f"{next(iter(b[0]))}-{i}" for i, b in enumerate(BAD)])
@pytest.mark.parametrize("function", [attention, explain])
def test_invalid_arguments_raise_clear_errors(function, changes, error, words):
    with pytest.raises(error) as caught:
        function(**(GOOD | changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "words"), [b for b in BAD if set(b[0]) <= {"query", "alpha", "mask", "window"}]
)
def test_attention_weights_validates_the_same(changes, error, words):
    given = {name: GOOD[name] for name in ("query", "key", "alpha", "beta", "sink")}
    with pytest.raises(error) as caught:
        attention_weights(**(given | changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": None}, "query must be a tensor [B, H, T, D], got NoneType"),
        ({"query": None, "block_table": torch.zeros(2, 1).int()}, "query must be a tensor [B, H, T, D], got NoneType"),
        ({"query": None, "lengths": torch.ones(2).int()}, "query must be a tensor [B, H, T, D], got NoneType"),
        (
            {"query": None, "lengths": torch.ones(2).int(), "block_table": torch.zeros(2, 1).int()},
            "query must be a tensor [B, H, T, D], got NoneType",
        ),
        ({"key": None}, "key must be a tensor"),
        ({"key": None, "block_table": torch.zeros(2, 1).int()}, "key must be a tensor [pages, page_size, G, D]"),
        ({"lengths": [3, 4]}, "lengths must be a tensor [B] of int32 or int64, one length per sequence, got list"),
        ({"lengths": torch.ones(2)}, "lengths must be a tensor [B] of int32 or int64, one length per sequence, got float32"),  # noqa: E501
        ({"lengths": torch.ones(2).int().to_sparse()}, "lengths must be a dense tensor"),
        ({"block_table": [[0]]}, "block_table must be a tensor [B, n] of int32 or int64"),
        ({"softmax_scale": 10**400}, "softmax_scale must be finite"),
        ({"window": "8"}, "window must be an int or None"),
    ],
)  # fmt: skip
def test_decode_attention_validates_the_same(changes, words):
    x = torch.ones(2, 4, 3, 8)
    with pytest.raises((TypeError, ValueError)) as caught:
        decode_attention(**{"query": x, "key": x, "value": x} | changes)
    assert words in str(caught.value)


@pytest.mark.parametrize("half", [torch.float16, torch.float64])
def test_autocast_keeps_an_fp32_gate_if_it_does_not_convert_the_query(half):
    x, gate = torch.randn(1, 2, 3, 8).to(half), torch.rand(1, 2, 3, 8)
    alpha = torch.rand(1, 2, 3)
    plain = attention(x, x, x, alpha=alpha, gate=gate)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(x, x, x, alpha=alpha, gate=gate), plain)
        assert attention(x.float(), x.float(), x.float(), gate=gate).dtype == torch.bfloat16
        with pytest.raises(TypeError, match="key must have the dtype of query"):
            attention(x, x.float(), x)


def test_an_invalid_flag_raises_after_a_valid_call():
    """True equals 1 as a dict key: the cached plan of a valid call must not be used for an invalid one."""
    x = torch.randn(1, 2, 3, 8)
    attention(x, x, x, is_causal=True, softmax_scale=1.0, window=1)
    for changes in ({"is_causal": 1}, {"softmax_scale": True}, {"window": True}):
        with pytest.raises(TypeError, match=next(iter(changes))):
            attention(x, x, x, **{"is_causal": True, "softmax_scale": 1.0, "window": 1} | changes)


def test_one_tensor_of_segments_needs_equal_lengths():
    query, key = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 5, 4)
    with pytest.raises(ValueError, match=r"must be a pair \(\[B, T\], \[B, S\]\) when T != S"):
        attention(query, key, key, segment_ids=torch.zeros(1, 3).long())


def test_head_dim_has_an_upper_limit():
    x = torch.ones(1, 1, 2, 264)
    with pytest.raises(ValueError, match="head dim D must be 1 to 256, got 264"):
        attention(x, x, x)


def test_rows_may_have_a_wider_dtype_than_the_query():
    x = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16)
    alpha = torch.rand(1, 2, 3)
    out = attention(x, x, x, alpha=alpha, beta=alpha.double(), sink=torch.zeros(2), gate=torch.rand(1, 2, 3, 8))
    assert out.dtype == torch.bfloat16


def test_a_softmax_scale_that_is_traced_does_not_break_the_graph():
    """Under dynamic=True a float attribute of a module becomes symbolic, which math.isfinite does not support."""
    torch._dynamo.reset()
    call = torch.compile(
        lambda x, scale: attention(x, x, x, is_causal=True, softmax_scale=scale),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    x = torch.randn(1, 2, 5, 8)
    for scale in (0.3, 0.7):
        torch.testing.assert_close(call(x, scale), attention(x, x, x, is_causal=True, softmax_scale=scale))
