import numpy as np
import pytest

from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.measures import Measure, final_loss
from affine_attention.lab.report.settings import Setting, settings_of
from affine_attention.lab.report.statistics import Estimate
from affine_attention.lab.report.verdicts import (
    CORRECTED,
    EITHER,
    FAILS,
    HOLDS,
    IN_PART,
    LOWERED,
    MIXED,
    OPEN,
    RAISED,
    ZERO,
    combine,
    compare,
    digits_for,
    family_verdict,
    in_families,
    judge,
    tally,
)

from .folders import make_run
from .patching import set_loss

stats = pytest.importorskip("scipy.stats")  # of lm-evaluation-harness
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
        (-0.5, 0.4, EITHER, LOWERED, ""),
        (0.5, 0.4, EITHER, RAISED, ""),
        (0.5, 0.6, EITHER, OPEN, ZERO),
    ],
)
def test_the_rule(mean, half, side, verdict, reason):
    found = Estimate(mean, half, 1 if half is None else 3, True, 0 if half is None else 2)
    assert judge(found, side) == (verdict, reason)


def test_a_corrected_p_decides():
    found = Estimate(-0.5, 0.4, 3, True, 2)
    assert 0.01 < found.p < 0.05
    assert judge(found, "lower", 0.049) == (HOLDS, "")
    assert judge(found, "lower", 0.051) == (OPEN, CORRECTED)


def test_a_side_is_lower_or_higher():
    with pytest.raises(ValueError, match=r"side must be .* got 'below'"):
        judge(Estimate(0.0, 1.0, 3, True, 2), "below")


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
    terms = [(1.0, pairs[0][0]), (-1.0, pairs[0][1]), (-1.0, pairs[1][0]), (1.0, pairs[1][1])]
    found = combine(LOSS, ("a", "b"), terms)
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


def test_a_setting_with_more_mechanisms_lends_its_error_term(tmp_path):
    losses = {
        "softmax": (2.0, 3.0, 4.0),
        "affine": (1.9, 2.9, 3.85),
        "sink": (2.1, 3.05, 4.1),
        "gated": (1.5, 2.55, 3.5),
    }
    (setting,) = settings_of(list(groups_with(tmp_path, losses).values()))
    pair = (("affine", setting.plain("affine")), ("softmax", setting.plain("softmax")))
    found = compare(LOSS, *pair, None, setting)
    values = np.array(list(losses.values()))
    residuals = values - values.mean(1, keepdims=True) - values.mean(0, keepdims=True) + values.mean()
    error = ((residuals**2).sum() / 6 * 2 / 3) ** 0.5  # (4 - 1) (3 - 1) degrees of freedom
    assert found.pooled.freedom == 6
    assert found.pooled.half_width == pytest.approx(stats.t.ppf(0.975, 6) * error)
    assert found.pooled.mean == found.delta.mean
    assert found.decisive is found.pooled
    assert found.decisive.p == pytest.approx(2 * stats.t.sf(abs(found.delta.mean) / error, 6))
    two = compare(LOSS, *pair, None, Setting("r", {}, [group for _, group in pair]))
    assert (two.pooled, two.decisive, two.why_own) == (None, two.delta, "only two mechanisms vary in this setting")


def test_unequal_variances_and_constant_cells_keep_the_pairs_own_error(tmp_path):
    losses = {
        "softmax": (2.0, 2.0001, 2.0002),
        "affine": (1.9, 1.9002, 1.9),
        "sink": (2.0, 5.0, 9.0),
        "gated": (1, 8, 2),
    }
    (setting,) = settings_of(list(groups_with(tmp_path / "a", losses).values()))
    pair = (("affine", setting.plain("affine")), ("softmax", setting.plain("softmax")))
    found = compare(LOSS, *pair, None, setting)
    assert found.pooled is None
    assert found.why_own.startswith("unequal variances (Bartlett's p = ")
    losses = {"softmax": (1.0, 1.0, 1.0), "affine": (1.9, 1.7, 1.8), "sink": (2.0, 2.2, 2.1), "gated": (1.5, 1.4, 1.6)}
    (setting,) = settings_of(list(groups_with(tmp_path / "b", losses).values()))
    pair = (("affine", setting.plain("affine")), ("softmax", setting.plain("softmax")))
    found = compare(LOSS, *pair, None, setting)
    assert (found.pooled, found.why_own) == (None, "constant in one of the mechanisms")


def test_a_family_is_corrected_together_and_has_one_verdict(tmp_path):
    losses = {"softmax": (2.0, 3.0, 4.0), "affine": (1.9, 2.91, 3.89), "sink": (1.8, 2.75, 3.78)}
    groups = groups_with(tmp_path, losses)

    def pair(ours, other, **more):
        return compare(LOSS, (ours, groups[ours]), (other, groups[other]), **more)

    lower, higher, same = pair("affine", "softmax"), pair("affine", "sink"), pair("softmax", "softmax")
    found = in_families([lower, higher, pair("affine", "softmax", tested=False)])
    own = sorted(each.decisive.p for each in (lower, higher))
    assert sorted(each.adjusted for each in found[:2]) == pytest.approx([2 * own[0], max(2 * own[0], own[1])])
    assert found[2].adjusted is None
    assert found[2].verdict == "", "a second measure of the same runs is no test"
    elsewhere = in_families([lower, pair("affine", "sink", setting="other")])
    assert [each.adjusted for each in elsewhere] == [each.decisive.p for each in elsewhere], "another family"
    assert family_verdict([lower]) == HOLDS
    assert family_verdict([lower, higher]) == MIXED
    assert family_verdict([higher]) == FAILS
    assert family_verdict([lower, same]) == IN_PART
    assert family_verdict([same]) == OPEN


@pytest.mark.parametrize(
    ("mean", "half", "least", "digits"),
    [(-0.0073, 0.00063, 3, 5), (1.33, 1.4, 0, 1), (100.0, 20.0, 2, 2), (-0.00025, None, 3, 5), (0, 0, 3, 3),
     (1e-9, 1e-12, 3, 6)],
)  # fmt: skip
def test_two_digits_of_the_interval_are_shown(mean, half, least, digits):
    assert digits_for(Estimate(mean, half, 3), least) == digits
