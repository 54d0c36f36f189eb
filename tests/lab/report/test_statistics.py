import math

import pytest

from affine_attention.lab.report.statistics import chi_squared_tail, difference, estimate, holm, t_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # tables of Student's t, 97.5 %
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (9, 2.26216),
        (10, 2.22814),
        (30, 2.04227),
        (100, 1.98397),
    ],
)
def test_quantiles_are_those_of_the_tables(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, rel=1e-5)


def test_quantiles_agree_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 5, 8, 17, 200):
        for confidence in (0.5, 0.9, 0.95, 0.999):
            expected = stats.t.ppf((1 + confidence) / 2, freedom)
            assert t_quantile(freedom, confidence) == pytest.approx(expected, rel=1e-9)


def test_the_interval_of_a_mean():
    found = estimate([2.0, 4.0, 6.0])
    assert found.mean == 4.0
    assert found.seeds == 3
    assert found.half_width == pytest.approx(4.30265 * 2.0 / math.sqrt(3), rel=1e-5)


def test_one_seed_has_no_interval_and_none_has_no_mean():
    assert estimate([3.0]).interval is None
    assert estimate([]) is None
    assert estimate([math.nan, 3.0]).seeds == 1
    assert estimate([math.nan]) is None


def test_differences_are_paired_by_seed():
    # The seeds differ far more than the mechanisms do: only pairing shows it.
    baseline = {0: 1.0, 1: 5.0, 2: 9.0}
    ours = {2: 8.9, 0: 0.8, 1: 4.9}
    found = difference(ours, baseline)
    assert found.paired
    assert found.mean == pytest.approx(-0.4 / 3)
    assert found.half_width == pytest.approx(4.30265 * math.sqrt(0.01 / 3) / math.sqrt(3), rel=1e-4)


def test_only_shared_seeds_count():
    found = difference({0: 1.0, 1: 2.0, 7: 100.0}, {0: 0.5, 1: 1.5, 9: -100.0})
    assert (found.mean, found.seeds) == (0.5, 2)


def test_without_shared_seeds_two_means_are_compared():
    stats = pytest.importorskip("scipy.stats")
    ours, baseline = {0: 1.0, 1: 2.0, 2: 4.0}, {5: 3.0, 6: 3.5, 7: 4.5, 8: 7.0}
    found = difference(ours, baseline)
    assert not found.paired
    assert found.mean == pytest.approx(7 / 3 - 4.5)
    welch = stats.ttest_ind(list(ours.values()), list(baseline.values()), equal_var=False).confidence_interval(0.95)
    # Whole degrees of freedom, rounded down: at least as wide as Welch's interval, and not much wider.
    assert (welch.high - welch.low) / 2 <= found.half_width <= 1.1 * (welch.high - welch.low) / 2


def test_one_seed_on_each_side_is_a_difference_without_interval():
    found = difference({0: 1.0}, {1: 2.0})
    assert (found.mean, found.half_width, found.paired) == (-1.0, None, False)
    assert difference({}, {0: 1.0}) is None
    assert difference({0: math.nan}, {0: 1.0}) is None


def test_equal_values_have_an_interval_of_width_zero():
    assert difference({0: 1.0, 1: 1.0}, {2: 1.0, 3: 1.0}).half_width == 0.0


def test_p_values_agree_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    values = [0.3, 0.5, 0.1, 0.4]
    assert estimate(values).p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    ours, other = {0: 1.0, 1: 1.4, 2: 1.1}, {7: 0.2, 8: 0.3, 9: 0.1}
    found = difference(ours, other)
    direct = 2 * stats.t.sf(found.mean / (found.half_width / stats.t.ppf(0.975, found.freedom)), found.freedom)
    assert found.p == pytest.approx(direct)
    assert estimate([3.0]).p is None
    assert estimate([3.0, 3.0]).p is None, "an interval without width"


def test_the_tail_of_chi_squared_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 4, 7, 10):
        for value in (0.01, 0.5, 3.0, 20.0, 90.0):
            assert chi_squared_tail(value, freedom) == pytest.approx(stats.chi2.sf(value, freedom), rel=1e-9)
    assert chi_squared_tail(0.0, 3) == 1.0


def test_holms_correction_is_that_of_his_example():
    # Holm (1979): the smallest is multiplied by n, the next by n - 1, and the order is kept.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
