"""Runs the checks of the matrix on llama, qwen2 and qwen3 for every mechanism, and tests the page."""

from __future__ import annotations

import pytest

from affine_attention.nn import PRESETS

from .matrix import FEATURES, PAGE, NotApplicable, page
from .models import EVERY_CASE, FAMILIES

FAST = [feature for feature in FEATURES if feature.__name__ not in ("compilation", "gradients")]


@pytest.mark.filterwarnings("ignore::affine_attention.hf.WeightsNotice")
@pytest.mark.parametrize(
    ("family", "mechanism"), [case for case in EVERY_CASE if case[0] in ("llama", "qwen2", "qwen3")]
)
def test_every_feature(family, mechanism):
    for feature in FAST:
        try:
            feature(family, mechanism)
        except NotApplicable:
            assert PRESETS[mechanism].identity_scale is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("mechanism", PRESETS)
def test_compilation(family, mechanism):
    (feature,) = (feature for feature in FEATURES if feature.__name__ == "compilation")
    feature(family, mechanism)


def test_the_page_counts_what_works_and_lists_failures():
    cells = {("llama", m, f.__name__): "ok" for m in ("affine", "sink") for f in FEATURES}
    cells["llama", "sink", "identity"] = "-"
    cells["llama", "affine", "padding"] = "AssertionError: no"
    text = page(cells, ["llama"], ["affine", "sink"])
    assert "| llama | 2/2 | 1/2 | " in text
    assert "| 1/1 |" in text
    assert "- llama, affine, padding: AssertionError: no" in text


def test_the_page_in_the_docs_has_every_family_and_no_failure():
    text = PAGE.read_text()
    for family in FAMILIES:
        assert f"| {family} |" in text
    assert "Failures" not in text
