from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.settings import main_settings, settings_of
from affine_attention.nn import Mechanism

from .folders import make_run


def settings(*folders):
    return settings_of(group_runs(load_runs(folders)))


def test_groups_with_equal_settings_are_together_despite_other_bookkeeping(tmp_path):
    (found,) = settings(
        make_run(tmp_path / "a", "softmax", steps=2),
        make_run(tmp_path / "b", "affine", steps=2, save_every=7),
        make_run(tmp_path / "c", "affine", 1, steps=2),
    )
    assert [group.method for group in found.groups] == ["softmax", "affine"]
    assert (found.runs, found.student, found.label) == (3, "", "")


def test_a_label_says_what_differs_from_the_main_setting(tmp_path):
    folders = [make_run(tmp_path / name, name, steps=2, teacher="runs/t/model") for name in ("softmax", "affine")]
    folders.append(make_run(tmp_path / "rate", "softmax", steps=2, teacher="runs/t/model", learning_rate=0.002))
    folders.append(make_run(tmp_path / "text", "softmax", steps=2))
    found = settings(*folders)
    assert [setting.label for setting in found] == ["", "learning_rate=0.002", "no teacher"]
    assert main_settings(found) == found[:1]
    assert found[1].changes(found[0]) == ["learning_rate"]
    assert found[0].named(["teacher"]) == ["teacher=t/model"]


def test_each_student_has_a_main_setting_and_its_name(tmp_path):
    found = settings(
        make_run(tmp_path / "a", "softmax", steps=2),
        make_run(tmp_path / "b", "softmax", steps=2, student="llama-30m"),
        make_run(tmp_path / "c", "affine", steps=2, student="llama-30m", learning_rate=0.002),
        make_run(tmp_path / "d", "softmax", steps=2, student="llama-30m", learning_rate=0.002),
    )
    assert [setting.label for setting in found] == [
        "student=llama-1m",
        "student=llama-30m, learning_rate=0.001",
        "student=llama-30m",
    ]
    assert [setting.label for setting in main_settings(found)] == ["student=llama-1m", "student=llama-30m"]


def test_recipes_are_named_when_there_are_several(tmp_path):
    found = settings(*(make_run(tmp_path / name, "softmax", steps=2, name=name) for name in ("one", "two")))
    assert [setting.label for setting in found] == ["one", "two"]
    assert len(main_settings(found)) == 2


def test_the_plain_mechanism_is_reported_from_its_variants(tmp_path):
    def affine(**changes):
        return Mechanism.named("affine", **{"bias_length": 256, **changes})

    (found,) = settings(
        make_run(tmp_path / "a", affine(bias_length="visible"), steps=2),
        make_run(tmp_path / "b", affine(activation="sigmoid"), steps=2),
        make_run(tmp_path / "c", affine(), steps=2),
        make_run(tmp_path / "d", affine(running_alpha_start=0.5), steps=2),
        make_run(tmp_path / "e", affine(bias_length=64), steps=2),
    )
    assert found.plain("affine").runs[0].name == "c"
    assert {label: group.runs[0].name for label, group in found.variants("affine")} == {
        "affine (bias_length=visible)": "a",
        "affine (activation=sigmoid)": "b",
        "affine (running_alpha_start=0.5)": "d",
        "affine (bias_length=64)": "e",
    }
    assert found.plain("sink") is None
    assert found.variants("sink") == []


def test_a_variant_alone_is_not_taken_for_the_mechanism(tmp_path):
    sigmoid = Mechanism.named("affine", bias_length=256, activation="sigmoid")
    (found,) = settings(make_run(tmp_path / "a", sigmoid, steps=2))
    assert found.plain("affine") is None
    assert [label for label, _ in found.variants("affine")] == ["affine (activation=sigmoid, bias_length=256)"]
