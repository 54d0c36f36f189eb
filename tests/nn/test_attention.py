"""AttentionMechanism and SelfAttention: coefficients, cached decoding, padding, packing."""

from __future__ import annotations

import pytest
import torch

from affine_attention import AttentionMechanism, KeyValueCache, Mechanism, SelfAttention, attention, attention_weights
from affine_attention.nn import PRESETS

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make_layer(mechanism="affine", **options) -> SelfAttention:
    torch.manual_seed(0)
    layer = SelfAttention(32, 4, 2, mechanism, **options).double()
    for name, parameter in layer.named_parameters():
        if "mechanism" in name:
            torch.nn.init.normal_(parameter, std=0.5)  # far from the initial values, where mechanisms differ little
    return layer.eval()


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_and_coefficients_of_every_mechanism(name):
    layer = AttentionMechanism(name, embed_dim=24, num_heads=6, head_dim=8)
    assert sum(p.numel() for p in layer.parameters()) == PRESETS[name].extra_parameters(24, 6, 8)
    hidden, query = torch.randn(2, 5, 24), torch.randn(2, 6, 5, 8)
    key = query[:, ::2]
    given = layer.coefficients(hidden, query, key, is_causal=True)
    has = [x is not None for x in given]
    mechanism = PRESETS[name]
    parts = [mechanism.has_alpha, bool(mechanism.bias), mechanism.sink is not None, mechanism.gate]
    assert has == [*parts, mechanism.exclusion is not None, mechanism.head_norm, True]
    assert given.weights == mechanism.weights
    assert layer(hidden, query, key, key, is_causal=True).shape == query.shape


@pytest.mark.parametrize(
    ("bias_length", "expected"),
    [(4, [4, 4, 4, 4, 5, 6]), (100, [100] * 6), ("visible", [1, 2, 3, 4, 5, 6]), ("keys", [6] * 6)],
)
def test_n_of_equation_8(bias_length, expected):
    mechanism = Mechanism.named("affine", bias_length=bias_length, running_alpha_start=0.5)
    layer = AttentionMechanism(mechanism, 8, 2, 4)
    query = torch.randn(1, 2, 6, 4)
    alpha, beta, *_ = layer.coefficients(torch.randn(1, 6, 8), query, query, is_causal=True)
    torch.testing.assert_close(beta, (0.5 - alpha) / torch.tensor(expected))


def test_n_is_one_where_nothing_is_visible():
    layer = AttentionMechanism(Mechanism.named("affine", bias_length="visible"), 8, 2, 4)
    query = torch.randn(1, 2, 3, 4)
    mask = torch.zeros(1, 3, dtype=torch.bool)
    given = layer.coefficients(torch.randn(1, 3, 8), query, query, mask=mask, is_causal=True)
    assert torch.isfinite(given.beta).all()


def test_rows_sum_to_the_running_average_when_n_is_visible():
    layer = AttentionMechanism(Mechanism.named("affine", bias_length="visible", running_alpha_start=0.3), 8, 2, 4)
    query = torch.randn(1, 2, 9, 4)
    alpha, beta, *_ = layer.coefficients(torch.randn(1, 9, 8) * 50, query, query, is_causal=True)
    weights = attention_weights(query, query, alpha=alpha, beta=beta, is_causal=True)
    torch.testing.assert_close(weights.sum(-1), torch.full((1, 2, 9), 0.3))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("bias_length", [8, "visible"])
def test_cached_steps_equal_one_forward(name, window, bias_length):
    layer = make_layer(Mechanism.named(name, bias_length=bias_length, running_alpha_start=0.4), window=window)
    hidden = torch.randn(2, 17, 32, dtype=torch.float64)
    whole = layer(hidden)
    cache = KeyValueCache()
    steps = [layer(part, cache=cache) for part in hidden.split([6, 1, 4, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, **CLOSE)
    assert cache.length == 17


@pytest.mark.parametrize("name", PRESETS)
def test_left_padded_rows_equal_unpadded_rows(name):
    layer = make_layer(Mechanism.named(name, running_alpha_start=0.4))
    lengths = (7, 3, 1)
    rows = [torch.randn(1, n, 32, dtype=torch.float64) for n in lengths]
    batch = torch.cat([torch.nn.functional.pad(row, (0, 0, 7 - row.shape[1], 0), value=9.0) for row in rows])
    mask = torch.arange(7)[None] >= torch.tensor([7 - n for n in lengths])[:, None]
    out = layer(batch, mask=mask)
    cache = KeyValueCache()
    layer(batch[:, :5], mask=mask[:, :5], cache=cache)
    stepped = layer(batch[:, 5:], mask=mask, cache=cache)
    for index, row in enumerate(rows):
        unpadded = layer(row)
        torch.testing.assert_close(out[index, 7 - lengths[index] :], unpadded[0], **CLOSE)
        last = min(2, lengths[index])
        torch.testing.assert_close(stepped[index, 2 - last :], unpadded[0, -last:], **CLOSE)


@pytest.mark.parametrize("bias_length", [4, "visible"])
@pytest.mark.parametrize("name", PRESETS)
def test_packed_documents_equal_separate_documents(name, bias_length):
    layer = make_layer(Mechanism.named(name, bias_length=bias_length, running_alpha_start=0.4))
    lengths = [4, 7, 1]
    documents = [torch.randn(1, n, 32, dtype=torch.float64) for n in lengths]
    ids = torch.repeat_interleave(torch.tensor([5, 2, 9]), torch.tensor(lengths))[None]
    packed = layer(torch.cat(documents, 1), segment_ids=ids)
    for part, document in zip(packed.split(lengths, 1), documents, strict=True):
        torch.testing.assert_close(part, layer(document), **CLOSE)


@pytest.mark.parametrize("name", PRESETS)
def test_state_dict_round_trip(name):
    layer = make_layer(name)
    twin = SelfAttention(32, 4, 2, name).double()
    twin.load_state_dict(layer.state_dict())
    hidden = torch.randn(1, 6, 32, dtype=torch.float64)
    assert torch.equal(twin.eval()(hidden), layer(hidden))


@pytest.mark.parametrize("mechanism", [*PRESETS.values(), Mechanism.named("affine_gated", sink="learned")])
def test_later_tokens_and_other_rows_change_nothing(mechanism):
    layer = make_layer(mechanism)
    hidden = torch.randn(2, 9, 32, dtype=torch.float64)
    changed = hidden.clone()
    changed[:, 6:] = 7.0
    changed[1] = -3.0
    torch.testing.assert_close(layer(changed)[0, :6], layer(hidden)[0, :6], **CLOSE)


@pytest.mark.parametrize("mechanism", [*PRESETS.values(), Mechanism.named("affine_gated", sink="learned")])
def test_every_parameter_gets_a_gradient(mechanism):
    layer = make_layer(mechanism)
    layer.train()
    layer(torch.randn(2, 6, 32, dtype=torch.float64)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SelfAttention(32, 4, 3), "num_heads must be a multiple of num_kv_heads"),
        (lambda: SelfAttention(30, 4), "embed_dim must be a multiple of num_heads"),
        (lambda: SelfAttention(12, 4), "head_dim must be even for rotary positions, got 3"),
        (lambda: SelfAttention(32, 4, mechanism="afine"), "did you mean 'affine'?"),
        (lambda: AttentionMechanism("affine", 0, 4, 8), "embed_dim must be an integer of at least 1, got 0"),
        (lambda: make_layer()(torch.zeros(1, 4, 32).double(), mask=torch.ones(1, 3).bool()), "(0 cached and 4 new"),
        (
            lambda: make_layer(Mechanism.named("affine", bias_length="keys"))(
                torch.zeros(1, 4, 32).double(), cache=KeyValueCache()
            ),
            'bias_length="keys" cannot generate',
        ),
        (
            lambda: make_layer()(
                torch.zeros(1, 4, 32).double(), cache=KeyValueCache(), segment_ids=torch.zeros(1, 4).long()
            ),
            "segment_ids cannot be used with a cache",
        ),
    ],
)
def test_invalid_calls_raise_clear_errors(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    assert words in str(caught.value)


def test_differential_heads_contain_diff_v2():
    """DIFF V2 (microsoft/unilm, Diff-Transformer/Diff-Transformer-V2): attn[0::2] - sigmoid(lambda) attn[1::2]."""
    layer = AttentionMechanism("differential", 24, 4, 8).double()
    torch.nn.init.normal_(layer.difference_proj.weight)
    hidden = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    query, key, value = (torch.randn(2, heads, 7, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out = layer(hidden, query, key, value, is_causal=True)[:, 0::2]  # the heads that DIFF V2 keeps
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    shares = torch.sigmoid(hidden @ layer.difference_proj.weight[0::2].T).transpose(1, 2)
    expected = plain[:, 0::2] - shares[..., None] * plain[:, 1::2]
    torch.testing.assert_close(out, expected, **CLOSE)
    sources = (hidden, query, key, value, layer.difference_proj.weight)
    for mine, other in zip(*(torch.autograd.grad(x.square().sum(), sources) for x in (out, expected)), strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("layer_idx", [0, 3])
def test_the_operator_computes_diff_v1(layer_idx):
    """transformers' DiffLlamaAttention from two calls of the operator, one for each half of the value heads."""
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaConfig

    config = DiffLlamaConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=4, attn_implementation="eager"
    )
    theirs = DiffLlamaAttention(config, layer_idx).double()
    hidden = torch.randn(2, 7, 48, dtype=torch.float64, requires_grad=True)
    no_rotation = torch.ones(1, 7, 8, dtype=torch.float64), torch.zeros(1, 7, 8, dtype=torch.float64)
    hidden_keys = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)
    expected, _ = theirs(hidden, no_rotation, hidden_keys)

    query, key, value = (
        proj(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for proj in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    )
    # Heads h and h + H / 2 have the same values: those of a head of the first half and of its partner in the second.
    halves = [attention(query, key, half.repeat(1, 2, 1, 1), is_causal=True) for half in value.chunk(2, dim=1)]
    first, second = torch.cat(halves, -1).chunk(2, dim=1)
    share = torch.exp(theirs.lambda_q1 @ theirs.lambda_k1) - torch.exp(theirs.lambda_q2 @ theirs.lambda_k2)
    difference = first - (share + theirs.lambda_init) * second
    normed = torch.nn.functional.rms_norm(difference, (16,), eps=config.rms_norm_eps)
    found = theirs.o_proj(((1 - theirs.lambda_init) * normed).transpose(1, 2).flatten(2))
    close = {"rtol": 1e-5, "atol": 1e-6}  # their softmax and lambda are computed in fp32
    torch.testing.assert_close(found, expected, **close)
    sources = (hidden, *theirs.parameters())
    for mine, other in zip(*(torch.autograd.grad(x.square().sum(), sources) for x in (found, expected)), strict=True):
        torch.testing.assert_close(mine, other, **close)


def test_exclusion_is_that_of_neomme_and_of_xsa():
    """Transformers' NeoMMEExclusiveSelfAttention, and its formula with a share of 1 (arXiv 2603.09078)."""
    from transformers.models.neomme.modeling_neomme import NeoMMEExclusiveSelfAttention

    class Config:
        num_attention_heads, num_key_value_heads = 4, 2

    theirs = NeoMMEExclusiveSelfAttention(Config())
    torch.nn.init.normal_(theirs.alpha)
    ours = AttentionMechanism(Mechanism("x", exclusion="learned"), 24, 4, 8)
    ours.head_exclusion = theirs.alpha
    hidden = torch.randn(2, 7, 24)
    query, key, value = (torch.randn(2, heads, 7, 8, requires_grad=True) for heads in (4, 2, 2))
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    out = ours(hidden, query, key, value, is_causal=True)
    expected = theirs(plain.transpose(1, 2), value).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    sources = (query, key, value, theirs.alpha)
    for mine, other in zip(*(torch.autograd.grad(x.square().sum(), sources) for x in (out, expected)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    whole = AttentionMechanism("exclusive", 24, 4, 8)(hidden, query, key, value, is_causal=True)
    own = value.repeat_interleave(2, 1)
    share = (plain * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True)
    torch.testing.assert_close(whole, plain.detach() - share * own, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((whole * own).sum(-1), torch.zeros(2, 4, 7), rtol=0, atol=1e-5)


def test_exclusion_comes_before_the_gate_as_in_neomme():
    """The whole NeoMMEAttention of transformers: bidirectional, exclusion, then the gate and the output projection."""
    from transformers.models.neomme.modeling_neomme import NeoMMEAttention, NeoMMEConfig

    config = NeoMMEConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1,
        layer_types=["full_attention"], attn_implementation="eager",
    )  # fmt: skip
    theirs = NeoMMEAttention(config, 0).double()
    torch.nn.init.normal_(theirs.exclusive_self_attention.alpha)
    ours = AttentionMechanism("exclusive_gated", 24, 4, 16).double()
    ours.head_exclusion = theirs.exclusive_self_attention.alpha
    ours.gate_proj = theirs.output_projection.gate_proj
    hidden = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    no_rotation = torch.ones(1, 7, 16, dtype=torch.float64), torch.zeros(1, 7, 16, dtype=torch.float64)
    expected, _ = theirs(hidden, no_rotation)
    query, key, value = (
        proj(hidden).unflatten(-1, (-1, 16)).transpose(1, 2) for proj in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    )
    out = ours(hidden, theirs.q_norm(query), theirs.k_norm(key), value)
    found = theirs.output_projection.o_proj(out.transpose(1, 2).flatten(2))
    close = {"rtol": 1e-5, "atol": 1e-6}  # their norms and softmax are computed in fp32
    torch.testing.assert_close(found, expected, **close)
    sources = (hidden, *theirs.parameters())
    for mine, other in zip(*(torch.autograd.grad(x.square().sum(), sources) for x in (found, expected)), strict=True):
        torch.testing.assert_close(mine, other, **close)


def test_the_norm_of_heads_is_that_of_pytorch_before_the_gate():
    layer = AttentionMechanism("normed_gated", 24, 4, 8).double()
    torch.nn.init.normal_(layer.norm_weight)
    hidden, query = torch.randn(2, 5, 24).double(), torch.randn(2, 4, 5, 8).double()
    plain = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    gate = torch.sigmoid(layer.gate_proj(hidden)).unflatten(-1, (4, 8)).transpose(1, 2)
    expected = gate * torch.nn.functional.rms_norm(plain, (8,), eps=1e-6) * layer.norm_weight.view(4, 1, 8)
    torch.testing.assert_close(layer(hidden, query, query, query, is_causal=True), expected, **CLOSE)


def test_differential_heads_follow_each_other_within_a_key_value_head():
    layer = AttentionMechanism("differential", 24, 6, 8).double()
    hidden, query = torch.randn(1, 5, 24).double(), torch.randn(1, 6, 5, 8).double()
    key = torch.randn(1, 2, 5, 8).double()
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    share = torch.sigmoid(layer.difference_proj(hidden)).transpose(1, 2)[..., None]
    expected = plain - share * plain[:, [1, 2, 0, 4, 5, 3]]
    torch.testing.assert_close(layer(hidden, query, key, key, is_causal=True), expected, **CLOSE)


def test_differential_heads_must_share_their_values():
    with pytest.raises(ValueError, match="at least two query heads for each key-value head"):
        SelfAttention(32, 4, 4, "differential")
    query = torch.randn(1, 4, 3, 8)
    with pytest.raises(ValueError, match="at least two query heads for each key-value head"):
        AttentionMechanism("differential", 24, 4, 8)(torch.randn(1, 3, 24), query, query, query)


def test_the_sink_of_a_token_is_its_own():
    layer = AttentionMechanism(Mechanism.named("token_sink", sink_start=1.5), 24, 4, 8).double()
    hidden, query = torch.randn(2, 5, 24).double(), torch.randn(2, 4, 5, 8).double()
    rows = layer.coefficients(hidden, query, query, is_causal=True)
    torch.testing.assert_close(rows.sink, (hidden @ layer.sink_proj.weight.T).transpose(1, 2) + 1.5)
    scores = (query @ query.mT / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    weights = torch.softmax(torch.cat([scores, rows.sink[..., None]], -1), -1)[..., :-1]
    torch.testing.assert_close(layer(hidden, query, query, query, is_causal=True), weights @ query, **CLOSE)
