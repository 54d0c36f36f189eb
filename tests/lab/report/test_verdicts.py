import pytest

from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.measures import Measure, final_loss
from affine_attention.lab.report.statistics import Estimate
from affine_attention.lab.report.verdicts import (
    FAILS,
    HOLDS,
    OPEN,
    ZERO,
    compare,
    compare_gaps,
    digits_for,
    judge,
    tally,
)

from .folders import make_run
from .patching import set_loss

LOSS = Measure("Loss", final_loss)


@pytest.mark.parametrize(
    ("mean", "half", "side", "verdict", "reason"),
    [
        (-0.5, 0.4, "lower", HOLDS, ""),
        (-0.5, 0.4, "higher", FAILS, ""),
        (0.5, 0.4, "higher", HOLDS, ""),
        (0.5, 0.4, "lower", FAILS, ""),
        (-0.5, 0.6, "lower", OPEN, ZERO),
        (-0.5, 0.5, "lower", OPEN, ZERO),
        (-0.5, None, "lower", OPEN, "one seed"),
        (0.0, 0.0, "lower", OPEN, ZERO),
        (-1.0, 0.0, "lower", OPEN, "the same in every seed"),
        (-0.5, 0.4, "", "", ""),
    ],
)
def test_the_rule(mean, half, side, verdict, reason):
    assert judge(Estimate(mean, half, 1 if half is None else 3), side) == (verdict, reason)


def test_a_side_is_lower_or_higher():
    with pytest.raises(ValueError, match=r"side must be .* got 'below'"):
        judge(Estimate(0.0, 1.0, 3), "below")


def groups_with(tmp_path, losses, **settings):
    folders = []
    for name, values in losses.items():
        for seed, loss in enumerate(values):
            folders.append(set_loss(make_run(tmp_path / f"{name}-{seed}", name, seed, steps=12, **settings), loss))
    return {group.mechanism_name: group for group in group_runs(load_runs(folders))}


def test_a_comparison_is_paired_by_seed_and_uses_the_measures_direction(tmp_path):
    groups = groups_with(tmp_path, {"softmax": (2.0, 3.0, 4.0), "affine": (1.9, 2.91, 3.89)})
    found = compare(LOSS, ("affine", groups["affine"]), ("softmax", groups["softmax"]))
    assert (found.name, found.side, found.verdict) == ("affine − softmax", "lower", HOLDS)
    assert found.delta.mean == pytest.approx(-0.1)
    assert found.delta.half_width == pytest.approx(4.302652729911275 * 0.01 / 3**0.5)
    other = compare(LOSS, ("softmax", groups["softmax"]), ("affine", groups["affine"]))
    assert other.verdict == FAILS


def test_one_seed_missing_runs_and_unfinished_ones_are_inconclusive(tmp_path):
    groups = groups_with(tmp_path, {"softmax": (2.0,), "affine": (1.0,)})
    both = compare(LOSS, ("affine", groups["affine"]), ("softmax", groups["softmax"]))
    assert (both.verdict, both.reason, both.delta.mean) == (OPEN, "one seed", -1.0)
    lone = compare(LOSS, ("affine", groups["affine"]), ("sink", None))
    assert (lone.verdict, lone.reason, lone.delta) == (OPEN, "no run of sink", None)
    make_run(tmp_path / "unfinished", "sink", steps=12, planned=20, finished=False)
    (late,) = group_runs(load_runs([tmp_path / "unfinished"]))
    found = compare(LOSS, ("sink", late), ("softmax", groups["softmax"]))
    assert (found.verdict, found.reason) == (OPEN, "sink not finished")
    nothing = Measure("Nothing", lambda run: float("nan"))
    found = compare(nothing, ("affine", groups["affine"]), ("softmax", groups["softmax"]))
    assert (found.verdict, found.reason) == (OPEN, "not measured")


def test_a_difference_of_differences_is_paired_too(tmp_path):
    losses = {"softmax": (2.0, 3.0), "affine": (1.9, 2.8), "gated": (1.0, 5.0), "affine_gated": (0.95, 4.75)}
    groups = groups_with(tmp_path, losses)
    pairs = ((groups["affine_gated"], groups["gated"]), (groups["affine"], groups["softmax"]))
    found = compare_gaps(LOSS, ("a", "b"), *pairs)
    assert found.delta.mean == pytest.approx((0.05 - 0.05) / 2, abs=1e-12)  # −0.05 − −0.1 and −0.25 − −0.2
    assert found.delta.half_width == pytest.approx(12.706204736 * 0.05, rel=1e-6)
    assert found.verdict == ""


def test_a_tally_counts_what_has_a_verdict(tmp_path):
    groups = groups_with(tmp_path, {"softmax": (2.0, 3.0), "affine": (1.9, 2.91)})
    a, s = ("affine", groups["affine"]), ("softmax", groups["softmax"])
    found = [compare(LOSS, a, s), compare(LOSS, a, s), compare(LOSS, s, a), compare(LOSS, a, s, "")]
    assert tally(found) == "2 hold, 1 does not"
    assert tally([compare(LOSS, a, ("sink", None))]) == "1 inconclusive"
    assert tally([]) == ""


@pytest.mark.parametrize(
    ("mean", "half", "least", "digits"),
    [(-0.0073, 0.00063, 3, 5), (1.33, 1.4, 0, 1), (100.0, 20.0, 2, 2), (-0.00025, None, 3, 5), (0, 0, 3, 3),
     (1e-9, 1e-12, 3, 6)],
)  # fmt: skip
def test_two_digits_of_the_interval_are_shown(mean, half, least, digits):
    assert digits_for(Estimate(mean, half, 3), least) == digits
