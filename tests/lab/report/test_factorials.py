import math

import pytest

from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.factorials import factorials
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.verdicts import LOWERED, OPEN
from affine_attention.nn import Mechanism

from .folders import make_run
from .patching import set_perplexity

# With beta, without; linear clipping, sigmoid: beta lowers by 0.3 and 0.5, the activation changes by 0.1 and -0.1.
LEVELS = {"affine": 2.7, "affine_no_bias": 3.0, "head_gated": 3.1, "sigmoid": 2.6}
NOISE = ((0.01, -0.02, 0.03), (0.00, 0.02, -0.01), (-0.02, 0.01, 0.02), (0.03, -0.01, -0.02))


def make_cells(root, names=tuple(LEVELS)):
    folders = []
    for name, noise in zip(LEVELS, NOISE, strict=True):
        for seed in range(3) if name in names else ():
            sigmoid = Mechanism.named("affine", bias_length=256, activation="sigmoid")
            mechanism = sigmoid if name == "sigmoid" else name
            folder = make_run(root / f"{name}-{seed}", mechanism, seed, steps=12)
            folders.append(set_perplexity(folder, math.exp(LEVELS[name] + 0.5 * seed + noise[seed])))
    return group_runs(load_runs(folders))


def test_effects_are_contrasts_of_the_four_cells(tmp_path):
    found = {claim.key: claim.comparisons[0] for claim in factorials(make_cells(tmp_path))}
    beta = found["factorial-beta-first"]
    per_seed = [((2.7 + a) - (3.0 + n) + (2.6 + s) - (3.1 + h)) / 2 for a, n, h, s in zip(*NOISE, strict=True)]
    assert beta.delta.mean == pytest.approx(sum(per_seed) / 3)
    assert beta.delta.seeds == 3
    assert beta.pooled.freedom == (4 - 1) * (3 - 1)
    assert beta.verdict == LOWERED
    assert found["factorial-beta-interaction"].delta.mean == pytest.approx(
        sum((2.7 + a) - (3.0 + n) - (2.6 + s) + (3.1 + h) for a, n, h, s in zip(*NOISE, strict=True)) / 3
    )
    activation = found["factorial-beta-second"]
    assert abs(activation.delta.mean) < 0.02
    assert activation.verdict == OPEN


def test_an_incomplete_design_has_no_effects(tmp_path):
    assert factorials(make_cells(tmp_path, ("affine", "affine_no_bias", "head_gated"))) == []
