"""The error term of a setting, against direct computations and scipy."""

import numpy as np
import pytest

from affine_attention.lab.report.pooled import bartlett, contrast, pool

stats = pytest.importorskip("scipy.stats")  # of lm-evaluation-harness


def cells_of(values):
    """[cells, seeds] -> one mapping of seeds per cell; NaN is a missing run."""
    return [{seed: float(v) for seed, v in enumerate(row) if not np.isnan(v)} for row in values]


def test_a_balanced_layout_has_the_textbook_residuals():
    values = np.random.default_rng(0).normal(size=(5, 3)) + 10 * np.arange(3)
    found = pool(cells_of(values))
    residuals = values - values.mean(1, keepdims=True) - values.mean(0, keepdims=True) + values.mean()
    assert found.freedom == (5 - 1) * (3 - 1)
    assert found.deviation == pytest.approx(((residuals**2).sum() / found.freedom) ** 0.5)


def test_two_cells_give_the_paired_interval():
    values = np.random.default_rng(1).normal(size=(2, 4)) + np.arange(4)
    own = contrast([(1.0, cells_of(values)[0]), (-1.0, cells_of(values)[1])])
    pooled = pool(cells_of(values)).interval(own, (1, -1))
    direct = stats.ttest_rel(*values)
    low, high = direct.confidence_interval()
    assert own.p == pytest.approx(direct.pvalue)
    for found in (own, pooled):
        assert found.interval == pytest.approx((low, high))
        assert found.freedom == 3


def test_missing_runs_are_a_least_squares_fit():
    values = np.random.default_rng(2).normal(size=(4, 3)) + 5 * np.arange(3)
    values[1, 2] = values[3, 0] = np.nan
    found = pool(cells_of(values))
    rows, columns = np.nonzero(~np.isnan(values))
    # Dummies of the cells, and of all seeds but the first: full rank without a generalised inverse.
    design = np.c_[np.eye(4)[rows], np.eye(3)[columns][:, 1:]]
    y = values[rows, columns]
    residuals = y - design @ np.linalg.solve(design.T @ design, design.T @ y)
    assert found.freedom == len(y) - design.shape[1] == 4
    assert found.deviation == pytest.approx((residuals @ residuals / 4) ** 0.5)


def test_cells_without_information_are_left_out():
    values = np.random.default_rng(3).normal(size=(3, 3))
    constant, single = {0: 1.0, 1: 1.0, 2: 1.0}, {0: 7.0}
    assert pool([*cells_of(values), constant, single]) == pool(cells_of(values))
    assert pool([constant, single]) is None
    assert pool([]) is None
    assert pool([{0: 1.0, 1: 2.0}]) is None, "one cell has no residual once its seeds' effects are removed"


def test_bartlett_is_that_of_scipy_and_sees_unequal_cells():
    values = np.random.default_rng(4).normal(size=(4, 5)) * np.array([[1.0], [2.0], [0.5], [3.0]])
    assert bartlett(list(values.var(axis=1, ddof=1)), [4] * 4) == pytest.approx(stats.bartlett(*values).pvalue)
    assert not pool(cells_of(values * [[1], [1], [1], [100]])).usable
    assert bartlett([1.0], [3]) == 1.0


def test_a_common_effect_of_the_seeds_cannot_hide_unequal_cells():
    random = np.random.default_rng(5)
    values = random.normal(size=(8, 6)) * np.array([[1.0]] * 7 + [[30.0]]) + 100 * random.normal(size=6)
    assert not pool(cells_of(values)).usable


def test_a_contrast_uses_the_seeds_that_all_cells_have():
    a, b, c = {0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.5, 1: 1.0}, {5: 3.0, 6: 4.0}
    found = contrast([(1.0, a), (-1.0, b)])
    assert (found.mean, found.seeds) == (0.75, 2)
    assert not contrast([(1.0, a), (-1.0, c)]).paired
    assert contrast([(0.5, a), (0.5, b), (-1.0, c)]) is None


def test_the_pooled_interval_covers_and_the_one_with_the_seeds_effects_is_too_wide():
    """2,000 studies of 8 mechanisms and 3 seeds whose seeds matter: 95 % of the intervals hold the true difference."""
    random, covered, widths = np.random.default_rng(6), 0, []
    quantile = stats.t.ppf(0.975, 16)
    for _ in range(2000):
        values = random.normal(size=(8, 3)) + 2 * random.normal(size=3)
        cells = cells_of(values)
        own = contrast([(1.0, cells[0]), (-1.0, cells[1])])
        low, high = pool(cells).interval(own, (1, -1)).interval
        covered += low <= 0 <= high
        with_seeds = quantile * (values.var(axis=1, ddof=1).mean() * 2 / 3) ** 0.5
        widths.append(with_seeds / ((high - low) / 2))
    assert abs(covered / 2000 - 0.95) < 4 * (0.95 * 0.05 / 2000) ** 0.5, "four standard errors of the count"
    assert np.median(widths) > 1.5


@pytest.mark.parametrize("freedom_of", [(2, 2), (3, 3), (8, 3), (11, 5)])
def test_the_power_is_that_of_the_noncentral_t(freedom_of):
    found = pool(cells_of(np.random.default_rng(7).normal(size=freedom_of)))
    error = found.deviation * (2 / freedom_of[1]) ** 0.5
    assert found.visible_difference(freedom_of[1]) == pytest.approx(stats.t.ppf(0.975, found.freedom) * error)
    quantile = stats.t.ppf(0.975, found.freedom)
    power = stats.nct.sf(quantile, found.freedom, found.detectable_difference(freedom_of[1]) / error)
    assert power == pytest.approx(0.8, abs=1e-3)
