"""A recipe validates its settings and converts to and from JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affine_attention import Mechanism
from affine_attention.lab.recipe import Recipe, parse_setting, setting_help


def test_json_and_back():
    recipe = Recipe(
        mechanism=Mechanism.named("affine", momentum=0.5),
        data=("a.txt", "b.jsonl"),
        heldout=("c.txt",),
        student_changes={"num_hidden_layers": 2},
        teacher="teacher",
        device_batch=4,
    )
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_settings_change_a_copy_also_nested_ones():
    plain = Recipe()
    changed = plain.with_settings(
        {
            "mechanism": "affine",
            "mechanism.momentum": 0.5,
            "student_changes.vocab_size": 64,
            "steps": 300,
            "data": "a.txt",
        }
    )
    assert changed.mechanism == Mechanism.named("affine", momentum=0.5)
    assert changed.student_changes == {"vocab_size": 64}
    assert changed.data == ("a.txt",)
    assert plain == Recipe()
    assert set(plain.difference(changed)) >= {"steps: 200 -> 300", "mechanism.momentum: 0.9 -> 0.5"}
    assert plain.difference(plain) == []


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("steps=20", ("steps", 20)),
        ("learning_rate=1e-4", ("learning_rate", 1e-4)),
        ("teacher=none", ("teacher", None)),
        ("streaming=true", ("streaming", True)),
        ("compile=False", ("compile", False)),
        ("data=a=b.txt", ("data", "a=b.txt")),
        ('data=["a", "b"]', ("data", ["a", "b"])),
        ("mechanism.momentum=0.5", ("mechanism.momentum", 0.5)),
    ],
)
def test_settings_of_a_command_line(text, pair):
    assert parse_setting(text) == pair


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stepz": 1}, "did you mean 'steps'?"),
        ({"steps": "many"}, "steps must be an integer, got 'many'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": True}, "steps must be an integer, got True"),
        ({"learning_rate": -1.0}, "learning_rate must be above 0 and finite, got -1.0"),
        ({"divergence": "forward"}, "did you mean 'forward_kl'?"),
        ({"mechanism": "afine"}, "did you mean 'affine'?"),
        ({"mechanism.momentun": 0.5}, "did you mean 'momentum'?"),
        ({"steps.more": 1}, "steps has no nested settings"),
        ({"heldout": 0.9}, "heldout must be a finite number from 0 to 0.5, got 0.9"),
        ({"warmup_steps": 150, "decay_steps": 51}, "must fit into steps = 200, got 150 + 51"),
        ({"teacher": "t", "kd_weight": 0}, "nothing would be learned"),
        ({"data": [1]}, "data must be a list of strings, got [1]"),
        ({"device_batch": 0}, "device_batch must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError) as error:
        Recipe().with_settings(settings)
    assert words in str(error.value)


@given(st.integers(1, 64), st.integers(1, 16), st.none() | st.integers(1, 64))
def test_the_batch_is_the_product_or_an_error_with_numbers_that_work(batch, ranks, device_batch):
    recipe = Recipe(global_batch=batch, device_batch=device_batch)
    try:
        size, accumulation = recipe.micro_batches(ranks)
    except ValueError as error:
        assert str(batch) in str(error)  # noqa: PT017
        assert batch % ranks or (batch // ranks) % (device_batch or 1)
    else:
        assert size * accumulation * ranks == batch
        assert device_batch in (None, size)


def test_an_uneven_batch_lists_the_sizes_that_fit():
    with pytest.raises(ValueError) as error:
        Recipe(global_batch=16, device_batch=3).micro_batches(2)
    assert "device_batch can be 1, 2, 4, 8" in str(error.value)
    with pytest.raises(ValueError) as error:
        Recipe(global_batch=10).micro_batches(4)
    assert "1, 2, 5, 10 ranks, or set global_batch=12" in str(error.value)


def test_every_setting_has_its_text():
    assert all(setting_help().values())
