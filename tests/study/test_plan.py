"""A plan lists its runs, shares their settings, and rejects invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from affine_attention.nn import PRESETS
from affine_attention.study import Plan, parse_variant
from affine_attention.study.plan import named_mechanisms


def test_variants_change_the_mechanism_or_the_run():
    assert parse_variant("affine") == ("affine", {})
    assert named_mechanisms("softmax,affine") == ("softmax", "affine")
    assert named_mechanisms("all") == tuple(PRESETS)
    name, settings = parse_variant("affine+activation=sigmoid+learning_rate=0.003")
    assert name == "affine"
    assert settings == {"mechanism.activation": "sigmoid", "learning_rate": 0.003}


def test_every_mechanism_runs_with_every_seed_and_only_they_differ():
    plan = Plan(mechanisms=("softmax", "affine"), seeds=(0, 7), settings={"steps": 120})
    jobs = plan.jobs(Path("out"))
    assert [job.name for job in jobs] == ["softmax-seed0", "affine-seed0", "softmax-seed7", "affine-seed7"]
    first, second = jobs[0].recipe, jobs[1].recipe
    assert all(line.startswith("mechanism.") for line in first.difference(second))
    assert {line.split(":")[0] for line in first.difference(jobs[2].recipe)} == {"seed", "data_seed"}
    assert first.steps == 120
    assert second.mechanism.bias_length == second.sequence_length


def test_a_study_without_a_teacher_trains_one_on_the_same_data():
    plan = Plan(settings={"data": ("a.txt",), "vocabulary_size": 512, "steps": 120})
    assert plan.teacher.data == ("a.txt",)
    assert plan.teacher.vocabulary_size == 512
    assert plan.teacher.teacher is None
    assert plan.jobs(Path("out"))[0].recipe.teacher == "beside:../teacher/model"
    assert Plan(settings={"teacher": "somewhere"}).teacher is None
    assert Plan(settings={"teacher": None}).jobs(Path("out"))[0].recipe.teacher is None
    assert Plan(recipe="paper_1b").teacher is None


def test_a_conversion_starts_from_the_model_that_the_study_trains():
    plan = Plan(recipe="convert_cpu", mechanisms=("softmax", "affine+sink_pressure=first_key"))
    assert plan.teacher.name == "tiny_teacher"
    first, second = (job.recipe for job in plan.jobs(Path("out")))
    assert first.student == second.student == "beside:../teacher/model"
    assert (first.teacher, second.sink_pressure) == ("original", "first_key")
    assert second.located(Path("/out/affine-seed0")).teacher == "/out/teacher/model"
    assert plan.of_known_size(first).student_changes == plan.teacher.student_changes
    assert "trained first" in plan.describe()
    without = Plan(recipe="convert_cpu", settings={"teacher": None})
    assert without.teacher.name == "tiny_teacher"
    assert without.jobs(Path("out"))[0].recipe.teacher is None
    assert Plan(recipe="convert_cpu", settings={"student": "some/folder"}).teacher is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mechanisms": ("afine",)}, "did you mean 'affine'?"),
        ({"mechanisms": ("affine+momentun=0.5",)}, "no setting 'momentun'"),
        ({"mechanisms": ()}, "mechanisms must not be empty"),
        ({"seeds": tuple(range(100_000))}, "at most 1,000 students"),
        ({"seeds": (1, 1)}, "seeds must not repeat, got 1 twice"),
        ({"recipe": "tiny"}, "recipe must be one of"),
        ({"settings": {"stepz": 3}}, "did you mean 'steps'?"),
    ],
)
def test_what_cannot_run_is_rejected_when_the_plan_is_made(changes, words):
    with pytest.raises(ValueError) as error:
        Plan(**changes)
    assert words in str(error.value)


def test_mechanisms_that_would_share_a_folder_are_rejected():
    with pytest.raises(ValueError) as error:
        Plan(mechanisms=("affine+student=a b", "affine+student=a_b"))
    assert "'affine+student=a b' and 'affine+student=a_b' would both use" in str(error.value)
