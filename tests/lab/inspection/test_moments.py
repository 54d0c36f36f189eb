"""Means, deviations and histograms from parts equal those of the whole."""

from __future__ import annotations

import pytest
import torch

from affine_attention.lab.inspection.moments import Histogram, Moments
from affine_attention.lab.inspection.tally import SHARE_EDGES


def test_parts_add_up_to_the_whole():
    make = torch.Generator().manual_seed(0)
    values = torch.randn(7, 3, 50, generator=make, dtype=torch.float64) + 1e6  # far from 0: sums of squares would fail
    counted = torch.rand(7, 3, 50, generator=make) < 0.6
    counted[:, 2] = False
    moments = Moments(3)
    for part in (slice(0, 1), slice(1, 1), slice(1, 6), slice(6, 7)):
        moments.add(values[part], counted[part])
    for head in range(2):
        chosen = values[:, head][counted[:, head]]
        assert moments.means()[head] == pytest.approx(chosen.mean().item(), rel=1e-14)
        assert moments.deviations()[head] == pytest.approx(chosen.std(correction=0).item(), rel=1e-9)
    assert moments.means()[2] is moments.deviations()[2] is None


def test_a_non_finite_value_affects_only_its_head_and_only_if_counted():
    values = torch.tensor([[[1.0, torch.nan], [1.0, 3.0]]])
    moments = Moments(2)
    moments.add(values, torch.tensor([[[True, False], [True, True]]]))
    assert moments.means() == [1, 2]
    moments.add(values, torch.ones(1, 2, 2, dtype=torch.bool))
    assert moments.means() == [None, 2]


def test_histograms_count_by_head_with_what_lies_outside_in_the_end_bins():
    histogram = Histogram(2, SHARE_EDGES)
    values = torch.tensor([[[-3.0, 0.0, 1.0, 9.0, torch.nan], [0.5, 0.52, 0.5, 0.489, 0.5]]])
    counted = torch.ones(1, 2, 5, dtype=torch.bool)
    counted[0, 1, 4] = False
    histogram.add(values, counted)
    assert histogram.counts[0].nonzero().flatten().tolist() == [0, 50]
    assert histogram.counts[0, [0, 50]].tolist() == [2, 2]
    assert histogram.counts[1, [24, 25, 26]].tolist() == [1, 2, 1]
    truth = torch.histogram(torch.tensor([0.5, 0.489, 0.5]).double(), SHARE_EDGES)[0]
    assert truth[24:26].tolist() == [1, 2]


def test_rounding_around_one_stays_in_one_bin():
    histogram = Histogram(1, SHARE_EDGES)
    histogram.add(1 + torch.linspace(-1e-6, 1e-6, 20).view(1, 1, 20), torch.ones(1, 1, 20, dtype=torch.bool))
    assert histogram.counts[0, -1] == 20
