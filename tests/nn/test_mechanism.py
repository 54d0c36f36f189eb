"""Presets, settings, JSON and parameter counts of mechanisms."""

from __future__ import annotations

import math

import pytest

from affine_attention import Mechanism
from affine_attention.nn.mechanism import PRESETS, as_mechanism
from affine_attention.nn.mechanism import WEIGHTS as mechanism_weights
from affine_attention.ops.weights import NAMES

# width, layers, query heads, head dim of the three students (their published configurations)
QWEN_0_5B = (1024, 24, 16, 64)
LLAMA_1B = (2048, 16, 32, 64)
LLAMA_3B = (3072, 28, 24, 128)


def test_the_first_eight_presets_are_the_table_of_the_paper_and_its_controls():
    table = {name: (m.activation, m.bias, m.sink, m.gate) for name, m in list(PRESETS.items())[:8]}
    assert table == {
        "softmax": (None, False, None, False),
        "off_by_one": (None, False, "zero", False),
        "sink": (None, False, "learned", False),
        "gated": (None, False, None, True),
        "affine": ("linear_clipping", True, None, False),
        "affine_gated": ("linear_clipping", True, None, True),
        "head_gated": ("sigmoid", False, None, False),
        "affine_no_bias": ("linear_clipping", False, None, False),
    }
    affine = Mechanism.named("affine")
    assert (affine.bias_length, affine.momentum, affine.running_alpha_start, affine.init_std) == (2048, 0.9, 0.0, 0.02)


@pytest.mark.parametrize(
    ("model", "mechanism", "millions"),
    [
        (QWEN_0_5B, "affine", 0.393),
        (LLAMA_1B, "affine", 1.049),
        (LLAMA_3B, "affine", 2.064),
        (LLAMA_1B, "gated", 67.109),
        (LLAMA_3B, "gated", 264.241),
        (LLAMA_1B, "affine_gated", 68.157),
        (LLAMA_3B, "affine_gated", 266.306),
        (LLAMA_1B, "head_gated", 1.049),
        (LLAMA_1B, "softmax", 0.0),
    ],
)
def test_extra_parameters_are_those_of_the_paper(model, mechanism, millions):
    width, layers, heads, dim = model
    assert round(layers * Mechanism.named(mechanism).extra_parameters(width, heads, dim) / 1e6, 3) == millions


def test_the_sink_adds_one_parameter_per_head():
    assert Mechanism.named("sink").extra_parameters(2048, 32, 64) == 32


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("affine_low_start", 64 * 8),
        ("affine_centred", 64 * 8 + 8),
        ("affine_free", 2 * 64 * 8),
        ("head_gated_double", 64 * 8),
        ("head_gated_softplus", 64 * 8),
        ("per_head_alpha", 8),
        ("constant_alpha", 0),
        ("token_sink", 64 * 8),
        ("exclusive", 0),
        ("exclusive_gated", 8 + 64 * 8 * 16),
        ("normed_gated", 8 * 16 + 64 * 8 * 16),
        ("differential", 64 * 8),
        ("signed_weights", 0),
        ("sigmoid_weights", 0),
        ("softplus_weights", 0),
        ("normalized_weights", 8 + 8 + 8 * 16),
    ],
)
def test_extra_parameters_of_the_other_rules(name, count):
    assert Mechanism.named(name).extra_parameters(64, 8, 16) == count


def test_settings_of_earlier_versions_load_and_are_written_unchanged():
    """The settings of a checkpoint from before there were rules other than the paper's."""
    earlier = {
        "name": "affine", "activation": "linear_clipping", "bias": True, "sink": None, "gate": False,
        "bias_length": 1024, "momentum": 0.9, "running_alpha_start": 0.0, "init_std": 0.02, "sink_start": 0.0,
    }  # fmt: skip
    loaded = Mechanism.from_dict(earlier)
    assert loaded == Mechanism.named("affine", bias_length=1024)
    assert loaded.to_dict() == earlier
    assert Mechanism.named("affine_low_start").to_dict()["alpha_start"] == 0.25


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name):
    mechanism = Mechanism.named(name, momentum=0.95, bias_length="visible")
    assert Mechanism.from_json(mechanism.to_json()) == mechanism


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Mechanism.named("afine"), ValueError, "did you mean 'affine'?"),
        (lambda: Mechanism.named("affine", momentun=0.5), ValueError, "did you mean 'momentum'?"),
        (lambda: Mechanism.named("softmax", bias=True), ValueError, "bias=True needs an alpha"),
        (lambda: Mechanism.named("affine", activation="sigmoyd"), ValueError, "did you mean 'sigmoid'?"),
        (lambda: Mechanism.named("affine", bias="centered"), ValueError, "did you mean 'centred'?"),
        (lambda: Mechanism.named("gated", differential=True), ValueError, "cannot be combined with gate=True"),
        (
            lambda: Mechanism.named("exclusive", differential=True),
            ValueError,
            "be combined with exclusion='full'",
        ),
        (
            lambda: Mechanism.named("affine", exclusion="half"),
            ValueError,
            "exclusion must be None or one of 'full'",
        ),
        (
            lambda: Mechanism.named("sink", weights="sigmoid"),
            ValueError,
            "sink='learned' cannot be combined with weigh",
        ),
        (lambda: Mechanism.named("affine", weights="softmx"), ValueError, "did you mean 'softmax'?"),
        (lambda: Mechanism.named("affine", bias=1), TypeError, "bias must be True or False, got 1"),
        (lambda: Mechanism.named("per_head_alpha", bias=True), ValueError, "needs an alpha that depends on the token"),
        (lambda: Mechanism.named("softmax", bias="free"), ValueError, "bias='free' needs an alpha"),
        (lambda: Mechanism.named("softmax", alpha_start=0.5), ValueError, "alpha_start needs an alpha"),
        (lambda: Mechanism.named("affine", alpha_start=1.0), ValueError, "above 0 and below 1 for activation='linear_"),
        (lambda: Mechanism.named("affine", alpha_start=math.nan), ValueError, "alpha_start must be above 0"),
        (lambda: Mechanism.named("affine", alpha_start="low"), TypeError, "alpha_start must be a number or None"),
        (lambda: Mechanism.named("affine", running_alpha_start=1.5), ValueError, "running_alpha_start must be"),
        (
            lambda: Mechanism.named("affine", sink="on"),
            ValueError,
            "sink must be None or one of 'zero', 'learned', 'token'",
        ),
        (lambda: Mechanism.named("affine", gate=1), TypeError, "gate must be True or False, got 1"),
        (lambda: Mechanism.named("affine", bias_length=0), ValueError, "bias_length must be an integer of at least 1"),
        (lambda: Mechanism.named("affine", bias_length="all"), ValueError, '"visible" or "keys", got \'all\''),
        (lambda: Mechanism.named("affine", bias_length=2.5), TypeError, "got 2.5"),
        (lambda: Mechanism.named("affine", bias_length=True), TypeError, "got True"),
        (lambda: Mechanism.named("affine", momentum=math.nan), ValueError, "finite number from 0 to 1, got nan"),
        (lambda: Mechanism.named("affine", momentum=1.5), ValueError, "momentum must be"),
        (lambda: Mechanism.named("affine", momentum="0.9"), TypeError, "momentum must be a number"),
        (lambda: Mechanism.named("affine", init_std=-1.0), ValueError, "init_std must be"),
        (lambda: Mechanism.named("sink", sink_start=-math.inf), ValueError, "sink_start must be"),
        (lambda: Mechanism(name=""), ValueError, "name must be a non-empty string"),
        (lambda: Mechanism.from_dict({"name": "x", "alpha": 1}), ValueError, "has no setting 'alpha'"),
        (lambda: Mechanism.from_dict([1]), TypeError, "settings must be a dict of mechanism settings, got list"),
        (lambda: as_mechanism(3), TypeError, "Mechanism or the name of a preset, got int"),
    ],
)
def test_invalid_settings_raise_clear_errors(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


def test_the_names_of_weights_are_those_of_the_operator():
    assert mechanism_weights == NAMES


def test_which_mechanisms_can_generate():
    for mechanism in (*PRESETS.values(), Mechanism.named("affine", bias_length="visible")):
        assert mechanism.can_generate
        mechanism.check_can_generate()
    assert Mechanism.named("affine_no_bias", bias_length="keys").can_generate, "without a bias there is no divisor"
    refused = Mechanism.named("affine", bias_length="keys")
    assert not refused.can_generate
    with pytest.raises(ValueError, match='bias_length="keys" cannot generate'):
        refused.check_can_generate()
