"""The rules of alpha and beta: against formulas written from their sources, and the worked example of CONTRIBUTING."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch.nn.functional import softplus
from torch.utils._python_dispatch import TorchDispatchMode

from affine_attention import AttentionMechanism, Mechanism, SelfAttention, attention, attention_weights
from affine_attention.nn import PRESETS, AffineScale, commit_running_alpha
from affine_attention.nn.coefficients import ALPHA_RULES, BETA_RULES
from tests.docs_commands import fences

from .models import ALPHA_FORMULAS

WIDTH, HEADS = 16, 4
# For a start of each rule other than its default.
OTHER_STARTS = {"linear_clipping": 0.25, "sigmoid": 0.1, "double_sigmoid": 0.5, "softplus": 1.0, "per_head": -0.5, "constant": 2.0}  # noqa: E501 # fmt: skip


def make_scale(mechanism: Mechanism) -> AffineScale:
    torch.manual_seed(0)
    scale = AffineScale(mechanism, WIDTH, HEADS).double()
    for name, parameter in scale.named_parameters():
        if "proj" in name:
            torch.nn.init.normal_(parameter, std=0.7)
    return scale


@pytest.mark.parametrize("has_start", [False, True])
@pytest.mark.parametrize("activation", ALPHA_RULES)
def test_alpha_and_its_gradient_are_the_formula(activation, has_start):
    start = OTHER_STARTS[activation] if has_start else None
    mechanism = Mechanism("x", activation=activation, alpha_start=start)
    scale = make_scale(mechanism)
    hidden = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    alpha, beta = scale(hidden)
    assert beta is None
    assert alpha.shape == (2, HEADS, 5)
    scores = torch.zeros(2, 5, HEADS, dtype=torch.float64)
    if scale.proj is not None:
        scores = hidden @ scale.proj.weight.T
    elif scale.head_alpha is not None:
        scores = scale.head_alpha.expand(2, 5, -1)
    expected = ALPHA_FORMULAS[activation](scores, mechanism.initial_alpha).transpose(1, 2)
    torch.testing.assert_close(alpha, expected, rtol=1e-12, atol=1e-12)
    sources = [p for p in (*scale.parameters(), hidden) if activation != "constant"]
    weights = torch.randn_like(expected)
    if sources:
        own = torch.autograd.grad((alpha * weights).sum(), sources, allow_unused=True)
        theirs = torch.autograd.grad((expected * weights).sum(), sources, allow_unused=True)
        for mine, other in zip(own, theirs, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ALPHA_RULES)
def test_alpha_starts_at_its_start_and_is_nonnegative_where_promised(activation):
    rule = ALPHA_RULES[activation]
    for start in (None, OTHER_STARTS[activation]):
        mechanism = Mechanism("x", activation=activation, alpha_start=start)
        scale = AffineScale(mechanism, WIDTH, HEADS)
        if scale.proj is not None:
            torch.nn.init.zeros_(scale.proj.weight)
        alpha, _ = scale(torch.randn(1, 3, WIDTH))
        torch.testing.assert_close(alpha, torch.full_like(alpha, mechanism.initial_alpha))
        if rule.is_exact or start is None:
            assert (alpha == torch.tensor(mechanism.initial_alpha)).all()
        if rule.nonnegative:
            extremes = torch.tensor([-1e4, -30.0, -1.0, 0.0, 1.0, 30.0, 1e4])
            scores = extremes if rule.scores == "token" else torch.zeros(7)
            assert (rule.function(scores, mechanism.initial_alpha) >= 0).all()
    assert Mechanism("x", activation=activation).nonnegative_alpha == rule.nonnegative
    assert Mechanism("x").nonnegative_alpha, "no alpha is an alpha of 1"


@pytest.mark.parametrize("activation", ["double_sigmoid", "softplus", "sigmoid", "linear_clipping"])
def test_gradients_stay_finite_for_large_scores(activation):
    scores = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30], requires_grad=True)
    alpha = ALPHA_RULES[activation].function(scores, OTHER_STARTS[activation])
    (grad,) = torch.autograd.grad(alpha.sum(), scores)
    assert alpha.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("num_keys", [7, torch.tensor([[[1, 2, 3, 4, 5]]])])
def test_beta_is_the_formula(num_keys):
    hidden = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    centred = make_scale(PRESETS["affine_centred"])
    torch.nn.init.normal_(centred.head_beta)
    alpha, beta = centred(hidden, num_keys)
    torch.testing.assert_close(beta, -centred.head_beta.view(1, HEADS, 1) * alpha / num_keys)
    free = make_scale(PRESETS["affine_free"])
    _, beta = free(hidden, num_keys)
    torch.testing.assert_close(beta, (hidden @ free.beta_proj.weight.T).transpose(1, 2) / num_keys)
    average = make_scale(Mechanism.named("affine_low_start", running_alpha_start=0.3))
    alpha, beta = average(hidden, num_keys)
    # The average is fp32.
    torch.testing.assert_close(beta, (torch.tensor(0.3).double() - alpha) / num_keys)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return function(*arguments, **(options or {}))


def test_both_projections_of_a_free_beta_are_one_product():
    free = make_scale(PRESETS["affine_free"])
    hidden = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)

    def run():
        with Products() as products:
            alpha, beta = free(hidden, 7)
            grads = torch.autograd.grad((alpha.cos() + beta.sin()).sum(), [hidden, *free.parameters()])
        return products.count, (alpha, beta, *grads)

    count, found = run()
    assert count == 3, "one in the forward, and one each for the hidden states and for the weights"
    calls = []
    handle = free.beta_proj.register_forward_hook(lambda *_: calls.append(1))
    count, expected = run()
    handle.remove()
    assert (count, calls) == (6, [1]), "a module with hooks is called"
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("frozen", ["proj", "beta_proj"])
def test_a_frozen_projection_gets_no_gradient(frozen):
    free = make_scale(PRESETS["affine_free"])
    getattr(free, frozen).requires_grad_(False)
    alpha, beta = free(torch.randn(2, 5, WIDTH, dtype=torch.float64), 7)
    (alpha + beta).sum().backward()
    for name in ("proj", "beta_proj"):
        assert (getattr(free, name).weight.grad is None) == (name == frozen)


def test_centred_rows_sum_to_zero_and_are_shaped_attention():
    """c_h = 1: the weights are alpha (A - C), C the uniform causal attention of shaped attention (arXiv 2311.01906)."""
    layer = AttentionMechanism(PRESETS["affine_centred"], WIDTH, HEADS, 8).double()
    torch.nn.init.ones_(layer.scale.head_beta)
    query, key, value = torch.randn(3, 1, HEADS, 9, 8, dtype=torch.float64)
    hidden = torch.randn(1, 9, WIDTH, dtype=torch.float64)
    alpha, beta, *_ = layer.coefficients(hidden, query, key, is_causal=True)
    weights = attention_weights(query, key, alpha=alpha, beta=beta, is_causal=True)
    torch.testing.assert_close(weights.sum(-1), torch.zeros(1, HEADS, 9, dtype=torch.float64), atol=1e-14, rtol=0)
    causal = torch.ones(9, 9, dtype=torch.float64).tril()
    uniform = causal / torch.arange(1, 10, dtype=torch.float64)[:, None]
    softmax = torch.softmax((query @ key.mT / 8**0.5).masked_fill(causal == 0, -torch.inf), -1)
    expected = alpha[..., None] * (softmax - uniform) @ value
    torch.testing.assert_close(layer(hidden, query, key, value, is_causal=True), expected, rtol=1e-12, atol=1e-13)


def test_softplus_is_the_head_gate_of_laguna():
    """Forward and gradients of a layer of transformers' own Laguna, with its weights."""
    from transformers.models.laguna.configuration_laguna import LagunaConfig
    from transformers.models.laguna.modeling_laguna import LagunaAttention

    torch.manual_seed(0)
    config = LagunaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        gating="per-head", layer_types=["full_attention"], num_attention_heads_per_layer=[4],
        attn_implementation="eager",
    )  # fmt: skip
    theirs = LagunaAttention(config, 0, 4).eval()
    hidden = torch.randn(2, 7, 32, requires_grad=True)
    cos, sin = torch.ones(2, 7, 8), torch.zeros(2, 7, 8)  # no rotation
    causal = torch.zeros(1, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    expected, _ = theirs(hidden, (cos, sin), causal)

    ours = AttentionMechanism("head_gated_softplus", 32, 4, 8)
    ours.scale.proj.weight = theirs.g_proj.weight
    query, key, value = (proj(hidden).unflatten(-1, (-1, 8)) for proj in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    query, key = theirs.q_norm(query).transpose(1, 2), theirs.k_norm(key).transpose(1, 2)
    out = ours(hidden, query, key, value.transpose(1, 2), is_causal=True)
    result = theirs.o_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    sources = [hidden, theirs.g_proj.weight, theirs.q_proj.weight, theirs.v_proj.weight]
    grads = [torch.autograd.grad(out.square().sum(), sources) for out in (result, expected)]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_softplus_is_the_function_of_pytorch():
    scores = torch.randn(100) * 10
    alpha = ALPHA_RULES["softplus"].function(scores, ALPHA_RULES["softplus"].start)
    torch.testing.assert_close(alpha, softplus(scores))


def test_the_running_average_of_an_alpha_above_one():
    """What the running average means does not depend on the rule: the mean of alpha over the tokens of the steps."""
    mechanism = Mechanism("x", activation="double_sigmoid", bias=True, momentum=0.5, running_alpha_start=1.5)
    scale = AffineScale(mechanism, WIDTH, HEADS)
    torch.nn.init.normal_(scale.proj.weight)
    alpha, beta = scale(torch.randn(3, 6, WIDTH), 10)
    torch.testing.assert_close(beta, (1.5 - alpha) / 10)
    (alpha.sum() + beta.sum()).backward()
    commit_running_alpha(scale)
    torch.testing.assert_close(scale.running_alpha, 0.5 * 1.5 + 0.5 * alpha.detach().mean((0, 2)))


@pytest.mark.parametrize("name", PRESETS)
def test_only_equation_8_has_a_running_average(name):
    layer = AttentionMechanism(name, WIDTH, HEADS, 8)
    has = "scale.running_alpha" in layer.state_dict()
    assert has == PRESETS[name].has_running_alpha == (PRESETS[name].bias is True)
    assert pickle.loads(pickle.dumps(layer)).mechanism == copy.deepcopy(layer).mechanism == layer.mechanism


def test_which_rules_the_kernels_of_the_gpu_have():
    served = {name for name, mechanism in PRESETS.items() if mechanism.has_kernels}
    assert served == {"affine", "affine_gated", "head_gated", "affine_no_bias"}
    assert Mechanism.named("affine", alpha_start=0.5).has_kernels
    assert not Mechanism.named("affine", bias="free").has_kernels


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].alpha_rule])
def test_bf16_layers_have_coefficients_in_fp32(name):
    layer = AttentionMechanism(name, WIDTH, HEADS, 8).to(torch.bfloat16)
    hidden, query = torch.randn(1, 3, WIDTH).bfloat16(), torch.randn(1, HEADS, 3, 8).bfloat16()
    alpha, beta, *_ = layer.coefficients(hidden, query, query, is_causal=True)
    assert alpha.dtype == torch.float32
    assert beta is None or beta.dtype == torch.float32


@pytest.mark.parametrize("rule", [*ALPHA_RULES.values(), *BETA_RULES.values()])
def test_every_rule_says_where_it_comes_from(rule):
    assert rule.formula
    assert len(rule.source) > 10


def test_the_worked_example_of_contributing():
    page = Path(__file__).parents[2] / "CONTRIBUTING.md"
    (example,) = [text for language, text in fences(page) if "ALPHA_RULES[" in text]
    names: dict = {}
    try:
        exec(example, names)
        mechanism = names["mechanism"]
        assert mechanism.extra_parameters(WIDTH, HEADS, 8) == WIDTH * HEADS
        assert mechanism.identity_scale == 1.0
        assert Mechanism.from_json(mechanism.to_json()) == mechanism
        layer = SelfAttention(32, 4, 2, mechanism)
        hidden = torch.randn(2, 6, 32)
        query = torch.randn(2, 4, 6, 8)
        rows = layer.mechanism.coefficients(hidden, query, query, is_causal=True)
        scores = (hidden @ layer.mechanism.scale.proj.weight.T).transpose(1, 2)
        torch.testing.assert_close(rows.alpha, 1 + scores.tanh())
        out = layer.mechanism(hidden, query, query[:, :2], query[:, :2], is_causal=True)
        expected = attention(query, query[:, :2], query[:, :2], alpha=1 + scores.tanh(), is_causal=True)
        torch.testing.assert_close(out, expected)
        layer(hidden).sum().backward()
        assert layer.mechanism.scale.proj.weight.grad.any()
    finally:
        ALPHA_RULES.pop("tanh", None)
