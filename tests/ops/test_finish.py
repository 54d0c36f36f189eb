"""Exclusion of the own value, the norm per head and the gate after it, against their sources and the fp64 reference."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from affine_attention import attention, decode_attention, explain
from affine_attention.testing import Case, make_inputs, run, run_oracle

EXACT = {"rtol": 1e-10, "atol": 1e-10}
KINDS = ("causal", "full", "causal+window", "causal+segments", "causal+padding", "mask", "head_mask")


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("visibility", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(33, 33), (7, 40), (40, 7), (0, 5), (5, 0), (1, 1)])
@pytest.mark.parametrize("extra", ["exclusion", "exclusion+head_norm"])
def test_fp64_equals_the_reference(visibility, queries, keys, extra):
    inputs = make_inputs(Case("affine_gated", visibility, queries=queries, keys=keys, dtype=torch.float64, extra=extra))
    result, truth = run(inputs, "composed"), run_oracle(inputs)
    for name in truth:
        torch.testing.assert_close(result[name], truth[name], **EXACT, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("impl", ["reference", "composed"])
def test_equals_the_formula_of_exclusive_self_attention(impl):
    """arXiv 2603.09078: z_i = y_i - (y_i . v_i) v_i / |v_i|^2, with the output orthogonal to the own value."""
    leaves = [draw(2, heads, 9, 8, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))]
    query, key, value = leaves
    repeated = value.repeat_interleave(2, 1)
    y = F.scaled_dot_product_attention(query, key.repeat_interleave(2, 1), repeated, is_causal=True)
    expected = y - (y * repeated).sum(-1, keepdim=True) * repeated / repeated.square().sum(-1, keepdim=True)
    found = attention(query, key, value, exclusion=1.0, is_causal=True, impl=impl)
    torch.testing.assert_close(found, expected, **EXACT)
    assert (found * repeated).sum(-1).abs().max() < 1e-12
    grad_out = draw(2, 4, 9, 8, seed=9)
    for a, b in zip(*(torch.autograd.grad(x, leaves, grad_out) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("impl", ["reference", "composed"])
def test_a_norm_and_a_gate_equal_those_of_kimi_linear(impl):
    """transformers' Kimi Linear normalises each head and then multiplies it by the sigmoid of a gate."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    norm = modeling.KimiLinearRMSNormGated(8, eps=1e-5)
    weight = (1 + 0.3 * draw(8, seed=7, dtype=torch.float32)).requires_grad_()
    norm.weight = torch.nn.Parameter(weight.detach().clone())
    query, key, value, gate = (draw(2, 4, 9, 8, seed=seed, dtype=torch.float32) for seed in range(4))
    found = attention(
        query, key, value, norm_weight=weight, norm_eps=1e-5, gate=gate.sigmoid(), is_causal=True, impl=impl
    )
    expected = norm(F.scaled_dot_product_attention(query, key, value, is_causal=True), gate)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), weight)[0], torch.autograd.grad(expected.sum(), norm.weight)[0]
    )


def test_one_weight_for_all_heads_equals_equal_weights_of_each_head():
    query, key, value = (draw(2, 4, 9, 8, seed=seed) for seed in range(3))
    shared = draw(8, seed=5).requires_grad_()
    by_head = shared.detach().expand(4, 8).clone().requires_grad_()
    outs = [attention(query, key, value, norm_weight=x, is_causal=True) for x in (shared, by_head)]
    torch.testing.assert_close(*outs, **EXACT)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out, x in zip(outs, (shared, by_head), strict=True)]
    torch.testing.assert_close(grads[0], grads[1].sum(0), **EXACT)


@pytest.mark.parametrize("impl", ["reference", "composed"])
def test_a_zero_own_value_leaves_the_output_as_it_is(impl):
    query, key, value = (draw(1, 2, 6, 8, seed=seed) for seed in range(3))
    value[:, :, 3] = 0
    value.requires_grad_()
    plain = attention(query, key, value, is_causal=True)
    found = attention(query, key, value, exclusion=1.0, is_causal=True, impl=impl)
    torch.testing.assert_close(found[:, :, 3], plain[:, :, 3], **EXACT)
    assert torch.autograd.grad(found.sum(), value)[0].isfinite().all()


@pytest.mark.parametrize("factor", [1e-25, 1e25])
def test_the_length_of_values_does_not_matter_to_the_projection(factor):
    """The square of such a value overflows or vanishes in fp32."""
    query, key, value = (draw(1, 2, 6, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    found = attention(query, key, value * factor, exclusion=1.0, is_causal=True) / factor
    torch.testing.assert_close(found, attention(query, key, value, exclusion=1.0, is_causal=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "composed"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_invisible_own_value_has_no_effect(impl, bad):
    """Right padding: the rows of padding see real tokens, but not their own key."""
    inputs = make_inputs(Case("affine_gated", "causal", extra="exclusion+norm", dtype=torch.float64))
    mask = torch.arange(65).expand(2, 65) < 50
    results = []
    for filling in (1.0, bad):
        tensors = {n: x.clone() for n, x in inputs.tensors.items() if x is not None}
        for name in ("key", "value"):
            tensors[name][:, :, 50:] = filling
        tensors["exclusion"][:, :, 50:] = filling
        leaves = {n: x.requires_grad_() for n, x in tensors.items()}
        out = attention(**leaves, is_causal=True, mask=mask, impl=impl)
        results.append((out, *torch.autograd.grad(out, list(leaves.values()), inputs.grad_out)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    without = {n: x for n, x in inputs.tensors.items() if x is not None and n != "exclusion"}
    plain = attention(**without, is_causal=True, mask=mask, impl=impl)
    torch.testing.assert_close(results[0][0][:, :, 50:], plain[:, :, 50:], **EXACT)


@pytest.mark.parametrize("impl", ["reference", "composed"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_see_no_key_are_zero_whatever_their_coefficients(impl, bad):
    inputs = make_inputs(Case("affine_gated", "causal", extra="exclusion+norm", dtype=torch.float64))
    mask = torch.arange(65).expand(2, 65) >= 9
    results = []
    for filling in (1.0, bad):
        tensors = {n: x.clone() for n, x in inputs.tensors.items() if x is not None}
        for name in ("alpha", "beta", "gate", "exclusion", "query", "value"):
            tensors[name][:, :, :9] = filling
        leaves = {n: x.requires_grad_() for n, x in tensors.items()}
        out = attention(**leaves, is_causal=True, mask=mask, impl=impl)
        assert not out[:, :, :9].any()
        results.append(dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), inputs.grad_out), strict=True)))
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-12, atol=1e-12)
        if name not in ("key", "value", "norm_weight"):
            assert not results[1][name][:, :, :9].any(), name


def test_only_requested_gradients():
    inputs = make_inputs(Case("affine_gated", dtype=torch.float64, extra="exclusion+norm"))
    truth = run_oracle(inputs)
    for name, x in inputs.leaves().items():
        given = {n: y.detach() for n, y in inputs.leaves().items()} | {name: x}
        out = attention(**given, **inputs.visible)
        torch.testing.assert_close(torch.autograd.grad(out, [x], inputs.grad_out)[0], truth[f"grad_{name}"], **EXACT)


def test_gradcheck_of_every_combination():
    tensors = {"query": draw(1, 4, 5, 3), "key": draw(1, 2, 7, 3, seed=1), "value": draw(1, 2, 7, 3, seed=2)}
    optional = {
        "exclusion": draw(1, 4, 5, seed=3), "norm_weight": 1 + draw(4, 3, seed=4), "gate": draw(1, 4, 5, 3, seed=5)
    }  # fmt: skip
    for chosen in itertools.product([False, True], repeat=3):
        given = tensors | {n: x for (n, x), has in zip(optional.items(), chosen, strict=True) if has}

        def call(*leaves, names=tuple(given)):
            return attention(**dict(zip(names, leaves, strict=True)), is_causal=True, impl="composed")

        assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in given.values()))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_decoding_equals_one_forward_of_each_sequence(paged, queries):
    lengths = torch.tensor([24, 11, 3])
    query, gate, gamma = draw(3, 4, queries, 8), draw(3, 4, queries, 8, seed=3), draw(3, 4, queries, seed=4)
    key, value = (draw(3, 2, 24, 8, seed=seed) for seed in (1, 2))
    for b, length in enumerate(lengths.tolist()):
        key[b, :, length:] = value[b, :, length:] = torch.nan
    finish = {"exclusion": gamma, "norm_weight": draw(4, 8, seed=5), "norm_eps": 1e-4, "gate": gate}
    cache, table = {"key": key, "value": value}, None
    if paged:
        table = torch.randperm(9, generator=torch.Generator().manual_seed(0)).view(3, 3).int()
        for name, x in cache.items():
            pages = torch.full((9, 8, 2, 8), torch.nan, dtype=x.dtype)
            pages[table.long()] = x.transpose(1, 2).unflatten(1, (3, 8))
            cache[name] = pages
    found = decode_attention(query, **cache, **finish, lengths=lengths, block_table=table)
    for b, length in enumerate(lengths.tolist()):
        own = {n: x[b : b + 1] if n in ("exclusion", "gate") else x for n, x in finish.items()}
        alone = attention(
            query[b : b + 1], key[b : b + 1, :, :length], value[b : b + 1, :, :length], **own, is_causal=True
        )
        torch.testing.assert_close(found[b : b + 1], alone, **EXACT)


def test_decoding_before_the_first_key_gives_zeros():
    query, key = draw(1, 2, 4, 8), draw(1, 2, 6, 8, seed=1)
    out = decode_attention(query, key, key, exclusion=1.0, norm_weight=torch.ones(8), lengths=torch.tensor([2]))
    assert not out[:, :, :2].any()
    assert out[:, :, 3].any()
    torch.testing.assert_close(
        decode_attention(query, key[:, :, :2], key[:, :, :2], exclusion=1.0, norm_weight=torch.ones(8)), out, **EXACT
    )


def test_meta_tensors_give_shapes_forward_and_backward():
    leaves = {n: x.to("meta").requires_grad_() for n, x in make_inputs(Case(extra="exclusion+norm")).leaves().items()}
    out = attention(**leaves, is_causal=True)
    assert out.is_meta
    for x, grad in zip(leaves.values(), torch.autograd.grad(out.sum(), list(leaves.values())), strict=True):
        assert grad.shape == x.shape


def test_autocast_lowers_the_inputs_once():
    tensors = make_inputs(Case("gated", extra="exclusion+norm")).leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(**tensors, is_causal=True)
    low = {n: x.bfloat16() if x.dim() == 4 else x for n, x in tensors.items()}
    assert torch.equal(out, attention(**low, is_causal=True))


def test_explain_names_the_pass_after_attention():
    tensors = make_inputs(Case("gated", extra="exclusion+norm")).leaves()
    choice = explain(**tensors, is_causal=True)
    assert choice.impl == "composed"
    assert choice.reason.endswith("then exclusion, norm, gate in one pass with PyTorch")
    with pytest.raises(ValueError, match='impl="fused" needs a CUDA GPU'):
        attention(**tensors, is_causal=True, impl="fused")


WRONG = [
    ({"exclusion": torch.ones(2, 65, 4)}, ValueError, "exclusion must have shape [B, H, T] = [2, 4, 65], got [2, 65"),
    ({"exclusion": "yes"}, TypeError, "exclusion must be a tensor [B, H, T], a number or None, got 'yes'"),
    ({"exclusion": True}, TypeError, "got True"),
    ({"exclusion": float("inf")}, ValueError, "exclusion must be finite, got inf; 1.0 excludes the own value"),
    ({"norm_weight": torch.ones(4)}, ValueError, "norm_weight must have shape [D] = [16] or [H, D] = [4, 16], got [4]"),
    ({"norm_weight": 1.0}, TypeError, "norm_weight must be a tensor [D] or [H, D], got float"),
    ({"norm_weight": torch.ones(16).half()}, TypeError, "norm_weight must be float32, float64 or the dtype of query"),
    ({"norm_weight": torch.ones(16), "norm_eps": 0.0}, ValueError, "norm_eps must be at least 1.18e-38 and finite"),
    ({"norm_weight": torch.ones(16), "norm_eps": "1"}, TypeError, "norm_eps must be a number, got '1'"),
    ({"exclusion": 1.0, "gate": torch.ones(1)}, ValueError, "gate must have 4 dimensions"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), WRONG)
@pytest.mark.parametrize("function", [attention, explain, decode_attention])
def test_errors_name_the_argument_the_rule_and_the_value(function, changes, error, words):
    given = {"query": torch.ones(2, 4, 65, 16), "key": torch.ones(2, 2, 65, 16), "value": torch.ones(2, 2, 65, 16)}
    with pytest.raises(error) as caught:
        function(**(given | changes))
    assert words in str(caught.value)


def test_norm_and_gate_equal_those_of_muse_spark():
    """transformers' MuseSparkTextAttention normalises each head without a weight, then multiplies it by its gate."""
    modeling = pytest.importorskip(
        "transformers.models.muse_spark.modeling_muse_spark", reason="needs transformers 5.23"
    )
    config = modeling.MuseSparkTextConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        layer_types=["full_attention"], mlp_layer_types=["dense"], attn_implementation="eager",
    )  # fmt: skip
    layer = modeling.MuseSparkTextAttention(config, 0).double()
    hidden = draw(2, 7, 24, seed=1).requires_grad_()
    hidden_mask = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)
    expected, _ = layer(hidden, None, hidden_mask)

    query, key, value = (
        proj(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    gate = torch.sigmoid(layer.gate_proj(hidden)).unflatten(-1, (4, 8)).transpose(1, 2)
    out = attention(
        layer.qk_norm(query) * layer.qk_scale_factor, layer.qk_norm(key), value, is_causal=True, gate=gate,
        norm_weight=torch.ones(8, dtype=torch.float64), norm_eps=config.rms_norm_eps,
    )  # fmt: skip
    found = layer.o_proj(out.transpose(1, 2).flatten(2))
    close = {"rtol": 1e-5, "atol": 1e-6}  # their norms and softmax are computed in fp32
    torch.testing.assert_close(found, expected, **close)
    sources = (hidden, *layer.parameters())
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), sources) for x in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, **close)
