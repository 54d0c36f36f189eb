import json

import pytest

from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import COLOURS, baseline_of, group_runs, omitted_settings
from affine_attention.nn import PRESETS, Mechanism

from .folders import make_run


def grouped(*folders):
    return group_runs(load_runs(folders))


def test_seeds_of_one_setting_are_one_group_and_the_baseline_is_first(tmp_path):
    folders = [
        make_run(tmp_path / f"{name}{seed}", name, seed, steps=2) for name in ("affine", "softmax") for seed in (1, 0)
    ]
    groups = grouped(*folders)
    assert [(group.label, [run.seeds[0] for run in group.runs]) for group in groups] == [
        ("softmax", [0, 1]),
        ("affine", [0, 1]),
    ]
    assert baseline_of(groups[1], groups) is groups[0]
    assert baseline_of(groups[0], groups) is None


def test_seeds_are_in_the_order_of_numbers_and_told_apart_by_both(tmp_path):
    (group,) = grouped(*(make_run(tmp_path / str(seed), "affine", seed, steps=2) for seed in (10, 2, 0)))
    assert [run.seed_label for run in group.runs] == ["0", "2", "10"]
    recipe = json.loads((tmp_path / "2" / "recipe.json").read_text())
    (tmp_path / "2" / "recipe.json").write_text(json.dumps(recipe | {"data_seed": 7}))
    assert grouped(tmp_path / "2")[0].runs[0].seed_label == "2 (data 7)"


def test_variants_are_kept_apart_and_labelled_with_what_differs(tmp_path):
    sigmoid = Mechanism.named("affine", bias_length=256, activation="sigmoid")
    groups = grouped(
        make_run(tmp_path / "a", "affine", steps=2),
        make_run(tmp_path / "b", "affine", steps=2, learning_rate=0.002),
        make_run(tmp_path / "c", sigmoid, steps=2),
        make_run(tmp_path / "d", "softmax", steps=2),
    )
    assert [group.label for group in groups] == [
        "softmax",
        "affine",
        "affine (learning_rate=0.002)",
        "affine (activation=sigmoid)",
    ]
    assert omitted_settings(groups) == "Unless a label says otherwise: tiny_cpu: learning_rate=0.001."
    assert len({group.dash for group in groups[1:]}) == 3
    assert len({group.colour for group in groups[1:]}) == 1


def test_a_baseline_must_have_the_same_settings(tmp_path):
    groups = grouped(
        make_run(tmp_path / "a", "softmax", steps=2),
        make_run(tmp_path / "b", "affine", steps=2, learning_rate=0.002),
        make_run(tmp_path / "c", "sink", steps=2, save_every=7, device_batch=4),
    )
    by_name = {group.mechanism_name: group for group in groups}
    assert baseline_of(by_name["affine"], groups) is None
    assert baseline_of(by_name["sink"], groups) is by_name["softmax"], "how a run is stored does not matter"


def test_recipes_are_named_when_there_are_several(tmp_path):
    groups = grouped(
        make_run(tmp_path / "a", "affine", steps=2, name="one"), make_run(tmp_path / "b", "affine", steps=2, name="two")
    )
    assert [group.label for group in groups] == ["one: affine", "two: affine"]


def test_every_preset_has_a_colour_of_its_own():
    assert set(COLOURS) == set(PRESETS)
    assert len({light for light, _ in COLOURS.values()}) == len({dark for _, dark in COLOURS.values()}) == len(COLOURS)


def test_unknown_mechanisms_get_different_colours(tmp_path):
    groups = grouped(*(make_run(tmp_path / name, Mechanism(name), steps=2) for name in ("mine", "yours")))
    assert groups[0].colour != groups[1].colour


@pytest.mark.parametrize(
    ("settings", "size"),
    [({}, "1B"), ({"steps": 100, "warmup_steps": 10, "decay_steps": 0}, None), ({"teacher": None}, None),
     ({"student": "llama-1m"}, None), ({"learning_rate": 5e-4}, None)],
)  # fmt: skip
def test_only_the_unchanged_recipe_of_the_paper_is_compared_with_it(tmp_path, settings, size):
    from affine_attention.recipes import paper_1b

    folder = make_run(tmp_path / "run", "affine", steps=2)
    (folder / "recipe.json").write_text(json.dumps(paper_1b("affine").with_settings(settings).to_dict()))
    assert grouped(folder)[0].paper_size == size


def test_all_three_recipes_of_the_paper_are_known(tmp_path):
    from affine_attention import recipes

    for function, size in ((recipes.paper_0_5b, "0.5B"), (recipes.paper_1b, "1B"), (recipes.paper_3b, "3B")):
        folder = make_run(tmp_path / size, "affine", steps=2)
        (folder / "recipe.json").write_text(json.dumps(function("affine").to_dict()))
        assert grouped(folder)[0].paper_size == size
