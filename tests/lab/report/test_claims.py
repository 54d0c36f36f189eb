"""Claims on runs whose differences are known."""

import math

import pytest

from affine_attention.lab.report import render
from affine_attention.lab.report.claims import claims
from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.verdicts import FAILS, HOLDS, OPEN
from affine_attention.nn import Mechanism

from .folders import make_run
from .patching import set_inspection, set_loss, set_perplexity
from .reading import Page

WOBBLE = (0.001, -0.002, 0.001)  # added to the difference of each seed
LOSSES = {"softmax": 2.0, "sink": 1.8, "affine": 1.9, "gated": 1.85, "affine_gated": 1.7, "head_gated": 1.9}
ENTROPY = {"softmax": (3.0, 3.0), "affine": (2.9, 3.4)}  # of p, of the weights
QUALITY = "ln c4 word PPL"  # the measure that is tested: these runs have no held-out loss
FIRST = {"softmax": 0.5, "affine": 0.3}


def make_study(root, seeds=(0, 1, 2), names=tuple(LOSSES), **settings):
    folders = []
    for name in names:
        for seed in seeds:
            shift = WOBBLE[seed] if name != "softmax" else 0.0
            loss = LOSSES[name] + 0.1 * seed + shift
            folder = make_run(root / f"{name}-{seed}", name, seed, steps=20, layers=2, heads=2, **settings)
            set_perplexity(set_loss(folder, loss), math.exp(loss))
            of_p, of_w = ENTROPY.get(name, (3.0, 3.0))
            grids = {key: [[value + shift, value + shift]] * 2 for key, value in
                     (("p", of_p), ("w", of_w), ("first", FIRST.get(name, 0.4)))}  # fmt: skip
            set_inspection(folder, entropy={"softmax": grids["p"], "weights": grids["w"]}, length=256,
                           first_token={"mean": grids["first"]})  # fmt: skip
            if name == "affine":  # mean α of 0.5 and mean β of 0: the softmax part is twice the weight
                half = [[0.5, 0.5]] * 2
                set_inspection(folder, alpha={"mean": half}, running_alpha=half)
            folders.append(folder)
    return folders


def judged(folders):
    """claim's key -> {(comparison, measure, setting): comparison}"""
    found = claims(group_runs(load_runs(folders)))
    return {claim.key: {(c.name, c.measure.label, c.setting): c for c in claim.comparisons} for claim in found}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def page(study):
    return Page(render(load_runs(study)))


def test_a_lower_loss_holds_against_softmax_and_not_against_a_better_sink(study):
    found = judged(study)["claim-loss"]
    better, worse = found["affine − softmax", QUALITY, ""], found["affine − sink", QUALITY, ""]
    assert better.delta.mean == pytest.approx(-0.1)
    assert (better.verdict, worse.verdict) == (HOLDS, FAILS)
    assert found["affine − softmax", "Loss", ""].verdict == "", "the same runs are one test"
    assert found["affine − sink", "Loss", ""].delta.mean > 0


def test_the_first_token_is_compared_with_and_without_alpha(study):
    found = judged(study)
    assert found["claim-first-token"]["affine − softmax", "First token, w", ""].verdict == HOLDS
    part = found["claim-first-token-part"]["affine − softmax", "First token, softmax part", ""]
    assert part.delta.mean == pytest.approx(0.6 - 0.5), "0.3 of a total of 0.5"
    assert part.verdict == FAILS


def test_the_entropy_is_split(study):
    claim = next(each for each in claims(group_runs(load_runs(study))) if each.key == "claim-entropy")
    whole, _, learned, added = claim.comparisons
    assert [each.verdict for each in (whole, learned, added)] == [HOLDS, "", ""]
    assert whole.delta.mean == pytest.approx(0.4)
    assert whole.delta.mean == pytest.approx(learned.delta.mean + added.delta.mean)
    part = judged(study)["claim-entropy-part"]["affine − softmax", "Entropy of softmax part", ""]
    assert (part.verdict, part.delta) == (FAILS, learned.delta)
    assert "Of +0.400 nats, −0.100 are in the softmax part and +0.500 come from β" in claim.notes[0]


def test_affine_and_gate(study):
    found = judged(study)["claim-gate"]
    assert found["affine_gated − gated", QUALITY, ""].verdict == HOLDS
    assert found["affine_gated − affine", QUALITY, ""].verdict == HOLDS
    more = found["(affine_gated − gated) − (affine − softmax)", QUALITY, ""]
    assert more.delta.mean == pytest.approx(-0.15 + 0.1)
    assert more.verdict == ""


def test_controls_compare_the_same_parameters(study):
    found = judged(study)["claim-controls"]
    assert found["affine − head_gated", QUALITY, ""].verdict == OPEN, "equal"
    assert found["sink − softmax", QUALITY, ""].verdict == HOLDS
    assert found["affine − affine_no_bias", QUALITY, ""].reason == "no run of affine_no_bias"


def test_gradients_and_heads_have_their_measures(study):
    found = judged(study)
    assert [key[1] for key in found["claim-gradients"]][:4] == ["Variance", "CV", "Spikes (k = 6)", "Spikes (k = 9)"]
    after = [key[1] for key in found["claim-after-warmup"] if key[0] == "affine − softmax"]
    assert after[:3] == ["CV, steps 101–500", "CV, steps 501–end", "Clipped %, steps 101–end"]
    names = [(key[0], key[1]) for key in found["claim-diversity"]]
    assert ("affine − sink", "Spread of total weight") in names
    assert not [name for name in names if name == ("affine − softmax", "Spread of total weight")], "1 in every head"


def test_the_sigmoid_must_differ_in_nothing_else(study, tmp_path):
    def sigmoid(folder, seed, **settings):
        mechanism = Mechanism.named("affine", bias_length=256, activation="sigmoid")
        loss = 2.5 + WOBBLE[seed - 1]
        return set_perplexity(make_run(tmp_path / folder, mechanism, seed, steps=20, **settings), math.exp(loss))

    key = ("affine − affine (sigmoid)", QUALITY, "")
    assert judged(study)["claim-activation"][key].reason == "no run of affine (sigmoid)"
    other = [sigmoid(f"rate{seed}", seed, learning_rate=0.002) for seed in (0, 1, 2)]
    assert judged(study + other)["claim-activation"][key].delta is None, "a run at another rate is not comparable"
    same = [sigmoid(f"same{seed}", seed) for seed in (0, 1, 2)]
    found = judged(study + same)["claim-activation"][key]
    assert (found.verdict, found.delta.seeds) == (HOLDS, 3)


def test_each_student_is_compared_separately(study, tmp_path):
    larger = make_study(tmp_path, (0, 1), ("softmax", "affine"), student="llama-30m")
    found = judged(study + larger)["claim-loss"]
    assert found["affine − softmax", "Loss", "student=llama-1m"].delta.seeds == 3
    assert found["affine − softmax", "Loss", "student=llama-30m"].delta.seeds == 2
    page = Page(render(load_runs(study + larger)))
    assert "Setting" in page.tables["claim-loss"][0]
    assert "No run at the same settings (student=llama-30m): sink." in page.text
    assert [row[0] for row in page.tables["verdicts"][1:3]] == [
        "Lower loss student=llama-1m",
        "Lower loss student=llama-30m",
    ]
