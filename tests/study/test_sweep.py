"""Grids of settings: what a comma means, which grids are refused, and the runs that they make."""

from __future__ import annotations

from pathlib import Path

import pytest

from affine_attention.study import Plan, parse_settings
from affine_attention.study.sweep import label_of, points, split_values


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1e-3", ["1e-3"]),
        ("5e-4,1e-3", ["5e-4", "1e-3"]),
        ('["a.txt","b,c.txt"]', ['["a.txt","b,c.txt"]']),
        ('[1,2],{"a":[3,4]}', ["[1,2]", '{"a":[3,4]}']),
        ('"a,b",c', ['"a,b"', "c"]),
        (r'"a\",b",c', [r'"a\",b"', "c"]),
        ("a,,b", ["a", "", "b"]),
        ("", [""]),
    ],
)
def test_a_comma_separates_values_outside_of_brackets_and_quotes(text, parts):
    assert split_values(text) == parts


def test_settings_and_grids_are_told_apart():
    settings, sweeps = parse_settings(
        ["steps=20", "learning_rate=5e-4, 1e-3", 'data=["a.txt","b.txt"]', "mechanism.momentum=0.9,0.99",
         "compile=true,false", 'student="a,b"', "decay_type=linear,1-sqrt"]
    )  # fmt: skip
    assert settings == {"steps": 20, "data": ["a.txt", "b.txt"], "student": "a,b"}
    assert sweeps == {
        "learning_rate": (5e-4, 1e-3), "mechanism.momentum": (0.9, 0.99), "compile": (True, False),
        "decay_type": ("linear", "1-sqrt"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["data=a.txt,b.txt"], "data is a list and has no grid of values"),
        (["heldout=0.01,0.02"], "heldout is a list"),
        (["learning_rate=1e-3,,2e-3"], "must not have an empty value"),
        (["learning_rate="], "must not have an empty value"),
        (["learning_rate=1e-3,"], "must not have an empty value"),
        (["steps=10", "steps=20"], "must name a setting once, got 'steps' twice"),
        (["steps=10", "steps=20,30"], "must name a setting once"),
        (["=3"], "a setting is written key=value"),
    ],
)
def test_what_is_ambiguous_or_empty_is_refused(texts, words):
    with pytest.raises(ValueError) as error:
        parse_settings(texts)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("sweeps", "words"),
    [
        ({"learning_rat": (1, 2)}, "did you mean 'learning_rate'?"),
        ({"learning_rate": (1e-3, "fast")}, "learning_rate must be a number, got 'fast'"),
        ({"learning_rate": (1e-3, 0.001)}, "must not repeat, got '0.001' twice"),
        ({"learning_rate": (1, 1.0)}, "are the same settings"),
        ({"learning_rate": (1e-3,)}, "needs at least two values"),
        ({"steps": tuple(range(100, 2000))}, "at most 1,000 students"),
        ({"seed": (0, 1)}, "use --seeds"),
        ({"mechanism": ("affine", "sink")}, "use --mechanisms"),
        ({"vocabulary_size": (512, 1024)}, "the teacher that the study trains has it too"),
        ({"teacher": ("a", "a b"), "steps": (100, 200), "warmup_steps": (1, 150)}, "warmup_steps"),
    ],
)  # fmt: skip
def test_a_grid_that_cannot_run_is_refused_when_the_plan_is_made(sweeps, words):
    with pytest.raises(ValueError) as error:
        Plan(mechanisms=("softmax", "affine"), sweeps=sweeps)
    assert words in str(error.value)


def test_a_setting_is_not_both_a_grid_and_a_value():
    with pytest.raises(ValueError, match="steps must be a setting or a grid, got both"):
        Plan(settings={"steps": 100}, sweeps={"steps": (100, 200)})
    with pytest.raises(ValueError, match=r"steps must be a grid or a setting of 'affine\+steps=100', got both"):
        Plan(mechanisms=("affine+steps=100",), sweeps={"steps": (200, 300)})


def test_every_mechanism_and_seed_runs_at_every_point():
    plan = Plan(
        mechanisms=("softmax", "affine+activation=sigmoid"), seeds=(0, 1),
        sweeps={"learning_rate": (5e-4, 1e-3), "beta2": (0.9, 0.99)},
    )  # fmt: skip
    jobs = plan.jobs(Path("out"))
    assert len(jobs) == 16
    assert [job.name for job in jobs[:3]] == [
        "softmax_learning_rate=0.0005_beta2=0.9-seed0",
        "affine_activation=sigmoid_learning_rate=0.0005_beta2=0.9-seed0",
        "softmax_learning_rate=0.0005_beta2=0.99-seed0",
    ]
    found = {(job.recipe.mechanism.name, job.recipe.seed, job.recipe.learning_rate, job.recipe.beta2) for job in jobs}
    assert len(found) == 16
    assert len({job.name for job in jobs}) == 16
    assert plan.to_dict()["sweeps"] == {"learning_rate": [5e-4, 1e-3], "beta2": [0.9, 0.99]}
    assert "grid: learning_rate = 0.0005, 0.001" in plan.describe()


def test_a_grid_over_teachers_trains_none():
    plan = Plan(mechanisms=("affine",), sweeps={"teacher": (None, "somewhere")})
    assert plan.teacher is None
    assert [job.recipe.teacher for job in plan.jobs(Path("out"))] == [None, "somewhere"]
    assert [job.name for job in plan.jobs(Path("out"))] == [
        "affine_teacher=none-seed0",
        "affine_teacher=somewhere-seed0",
    ]


def test_points_are_the_product_and_labels_name_their_values():
    assert points({}) == [{}]
    assert points({"a": (1, 2), "b": (3,)}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert (
        label_of({"mechanism.momentum": 0.9, "compile": True, "teacher": None})
        == "+momentum=0.9+compile=true+teacher=none"
    )
