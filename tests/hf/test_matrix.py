"""Runs the checks of the matrix on three families for every mechanism and on some of the others, and tests the page."""

from __future__ import annotations

import pytest

from affine_attention.hf import attach
from affine_attention.nn import PRESETS

from .matrix import FEATURES, PAGE, NotApplicable, is_served, page, run_cell, run_family
from .models import EVERY_CASE, FAMILIES, plain_model
from .multimodal import MULTIMODAL
from .tiny import CAUSAL

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
    cells["llama", "sink", "identity"] = "- it has no identity start"
    cells["llama", "affine", "padding"] = "AssertionError: no"
    cells["cohere", "sink", "caches"] = "- the plain model fails too: no"
    text = page(cells, {"bloom": "refused: it adds ALiBi", "emu3": "not built: no"}, ["affine", "sink"])
    assert "| llama | 2/2 | 1/2 | " in text
    assert "| 1/1 |" in text
    assert "- llama, affine, padding: AssertionError: no" in text
    assert "- cohere, sink, caches: the plain model fails too: no" in text
    assert "## Refused by `attach`\n\n- bloom: it adds ALiBi" in text
    assert "## No row\n\n- emu3: not built: no" in text


def test_a_cell_says_refused_only_where_this_package_refuses():
    def refuses(family, mechanism):
        attach(plain_model("qwen3"), "sink", start="identity")

    assert run_cell(refuses, "qwen3", "sink").startswith("refused: ValueError: start=")
    assert run_cell(lambda family, mechanism: int("x"), "qwen3", "sink").startswith("ValueError: invalid literal")


@pytest.mark.filterwarnings("ignore::affine_attention.hf.WeightsNotice", "ignore::affine_attention.hf.BiasLengthNotice")
@pytest.mark.parametrize("family", ["cohere2", "lfm2", "nemotron", "falcon_h1", "opt"])
def test_families_of_the_long_tail(family):
    """Windows, convolutions, layers that pass no keywords, state-space layers with buffers, masks that count."""
    assert is_served(family) == "served"
    cells = run_family(family, ["affine_gated"])
    assert {word for word in cells.values() if not word.startswith("- ")} == {"ok"}


def test_the_page_in_the_docs_has_every_family_and_no_failure():
    text = PAGE.read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    assert {*FAMILIES, *MULTIMODAL} <= set(rows)
    assert len(set(rows) - {"family"}) >= 80 + len(MULTIMODAL)
    for family in CAUSAL:
        assert f"| {family} |" in text or f"\n- {family}: " in text, family
    assert "Failures" not in text
