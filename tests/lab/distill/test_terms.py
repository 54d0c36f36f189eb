"""The settings of the distillation loss are validated."""

from __future__ import annotations

import pytest

from affine_attention.lab.distill.terms import Terms


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kd_weight": -1.0}, ("kd_weight", "-1.0")),
        ({"kd_weight": 0.0}, ("both 0",)),
        ({"temperature": 0.0}, ("temperature", "0.0")),
        ({"ce_weight": float("nan")}, ("ce_weight", "nan")),
        ({"divergence": "reverse_kl"}, ("forward_kl, soft_cross_entropy", "'reverse_kl'")),
    ],
)
def test_bad_terms(changes, words):
    with pytest.raises(ValueError) as error:
        Terms(**changes)
    assert all(word in str(error.value) for word in words)
