import math
import re

import pytest

from affine_attention.lab.report import render
from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.questions import questions, rates, signs
from affine_attention.lab.report.verdicts import FAILS, HOLDS
from affine_attention.nn import Mechanism

from .folders import make_run
from .patching import set_loss, set_perplexity
from .reading import Page

WOBBLE = (0.001, -0.002, 0.001)


def make_pair(root, gap, level=3.0, mechanism="affine", **settings):
    """softmax and another mechanism, three seeds, with the logarithms of their perplexities so far apart."""
    folders = []
    for seed in range(3):
        for name, value in (("softmax", level), (mechanism, level + gap + WOBBLE[seed])):
            folder = make_run(root / f"{name}-{seed}", name, seed, steps=12, **settings)
            folders.append(set_perplexity(set_loss(folder, value), math.exp(value)))
    return folders


def asked(folders):
    found = questions(group_runs(load_runs(folders)))
    return {q.key: {(c.name, c.measure.label, c.setting): c for c in q.comparisons} for q in found}


def test_there_are_no_questions_without_runs(tmp_path):
    folders = make_pair(tmp_path, -0.1)
    assert asked(folders) == {}
    assert rates(group_runs(load_runs(folders))) == []


def test_readings_of_the_formula_are_compared_with_the_plain_mechanism(tmp_path):
    folders = make_pair(tmp_path / "main", -0.1)
    for key, changes, loss in (("n", {"bias_length": "visible"}, 2.7), ("start", {"running_alpha_start": 0.5}, 3.2)):
        for seed in range(3):
            mechanism = Mechanism.named("affine", **{"bias_length": 256, **changes})
            folder = make_run(tmp_path / f"{key}-{seed}", mechanism, seed, steps=12)
            folders.append(set_perplexity(folder, math.exp(loss + 2 * WOBBLE[seed])))
    found = asked(folders)["question-variants"]
    assert found["affine (bias_length=visible) − affine", "ln c4 word PPL", ""].verdict == HOLDS
    assert found["affine (running_alpha_start=0.5) − affine", "ln c4 word PPL", ""].verdict == FAILS
    sigmoid = Mechanism.named("affine", bias_length=256, activation="sigmoid")
    folders.append(make_run(tmp_path / "sigmoid", sigmoid, steps=12))
    assert not [key for key in asked(folders)["question-variants"] if "sigmoid" in key[0]], "that is a claim"


def test_distillation_against_text_is_a_difference_of_differences(tmp_path):
    folders = make_pair(tmp_path / "kd", -0.1, teacher="teacher") + make_pair(tmp_path / "extra", -0.2, 3.0, "sink",
                                                                               teacher="teacher")  # fmt: skip
    folders += make_pair(tmp_path / "ce", -0.02, level=4.0)
    found = asked(folders)["question-settings"]
    assert found["affine − softmax", "ln c4 word PPL", "no teacher"].verdict == HOLDS
    key = "(affine − softmax here) − (in the main setting)"
    assert found[key, "ln c4 word PPL", "no teacher"].delta.mean == pytest.approx(0.08)
    assert found[key, "ln c4 word PPL", "no teacher"].verdict == ""
    assert (key, "Loss", "no teacher") not in found, "distillation and cross-entropy are different losses"


def test_learning_rates_have_a_table_and_the_best_of_each_is_compared(tmp_path):
    folders = make_pair(tmp_path / "one", -0.1, level=3.0)
    folders += make_pair(tmp_path / "two", +0.3, level=2.8, learning_rate=0.002)
    found = asked(folders)["question-settings"]
    assert found["affine − softmax", "ln c4 word PPL", "learning_rate=0.002"].verdict == FAILS
    moved = found["(affine − softmax here) − (in the main setting)", "Loss", "learning_rate=0.002"]
    assert moved.delta.mean == pytest.approx(0.4)
    best = found["affine at 0.001 − softmax at 0.002", "Loss", "each at its best rate"]
    assert best.delta.mean == pytest.approx(2.9 - 2.8)
    swept = {each.mechanism: each for each in rates(group_runs(load_runs(folders)))}
    assert {name: each.best for name, each in swept.items()} == {"softmax": 0.002, "affine": 0.001}
    (said,) = signs(list(swept.values()))
    gaps = [-0.1, 0.3]
    assert said.startswith("affine − softmax changes sign with the learning rate (means): −")
    assert [float(x.replace("−", "-")) for x in re.findall(r"[+−][\d.]+(?= at)", said)] == pytest.approx(gaps, abs=0.01)
    page = Page(render(load_runs(folders)))
    assert said in page.text
    assert page.tables["question-rates"][0] == ["Mechanism", "0.001", "0.002", "Best rate"]
    assert page.cell("question-rates", "softmax", "Best rate") == "0.002"
    assert page.cell("question-rates", "softmax", "0.002").startswith("2.8000")
    assert page.tables["question-stability"][0][:3] == ["Learning rate", "Mechanism", "ln c4 word PPL"]
    assert [row[:2] for row in page.tables["question-stability"][1:]] == [
        ["0.001", "softmax"], ["0.001", "affine"], ["0.002", "softmax"], ["0.002", "affine"],
    ]  # fmt: skip
    assert "The main setting, in which the claims above are tested: learning_rate=0.001." in page.text


def test_rates_of_two_objectives_are_not_mixed(tmp_path):
    folders = []
    for teacher, level in (("teacher", 3.0), (None, 4.0)):
        for rate in (0.001, 0.002):
            place = tmp_path / f"{teacher}-{rate}"
            folders += make_pair(place, -0.1, level + rate, teacher=teacher, learning_rate=rate)
    swept = rates(group_runs(load_runs(folders)))
    assert [(each.mechanism, each.setting, sorted(each.groups)) for each in swept] == [
        ("softmax", "", [0.001, 0.002]),
        ("affine", "", [0.001, 0.002]),
        ("softmax", "no teacher", [0.001, 0.002]),
        ("affine", "no teacher", [0.001, 0.002]),
    ]
    assert [words.split(" (means)")[0] for words in signs(swept)] == [
        "affine − softmax is below zero at every learning rate",
        "no teacher: affine − softmax is below zero at every learning rate",
    ]


def test_a_setting_without_softmax_is_named(tmp_path):
    folders = make_pair(tmp_path / "main", -0.1) + make_pair(tmp_path / "rate", -0.1, learning_rate=0.002)
    folders.append(make_run(tmp_path / "lone", "affine", steps=12, weight_decay=0.2))
    (question,) = questions(group_runs(load_runs(folders)))
    assert "No softmax run to compare with: weight_decay=0.2." in question.notes
