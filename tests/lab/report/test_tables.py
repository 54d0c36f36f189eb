import json
import math

import numpy as np
import pytest

from affine_attention.lab.report import render
from affine_attention.lab.report.collect import load_runs
from affine_attention.nn import Mechanism
from affine_attention.recipes import paper_1b

from .folders import make_run
from .reading import Page, plain

T_2 = 4.302652729911275  # Student's t, two degrees of freedom, 97.5 %
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Four mechanisms, three seeds each, and the page that was made of them."""
    root = tmp_path_factory.mktemp("study")
    names = ("softmax", "sink", "affine", "affine_gated")
    folders = [make_run(root / f"{name}-{seed}", name, seed, steps=60) for name in names for seed in SEEDS]
    folders.append(make_run(root / "gated-0", "gated", 0, steps=60))
    return root, Page(render(load_runs(folders)))


def values(root, name, read):
    return np.array([read(root / f"{name}-{seed}") for seed in SEEDS])


def last_loss(folder):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return np.mean([json.loads(line)["loss"] for line in lines[-10:]])


def evaluated(folder):
    return json.loads((folder / "evaluation.json").read_text())


def test_table_1_holds_means_and_intervals_over_seeds(study):
    root, page = study
    for name in ("softmax", "sink", "affine"):
        losses = values(root, name, last_loss)
        half = T_2 * losses.std(ddof=1) / math.sqrt(3)
        assert page.cell("table-1", name, "Loss") == f"{losses.mean():.3f} ± {half:.3f}"
        words = values(root, name, lambda folder: evaluated(folder)["perplexity"]["c4"]["word"])
        assert plain(page.cell("table-1", name, "c4 word PPL")) == pytest.approx(words.mean(), abs=0.006)
        piqa = values(root, name, lambda folder: 100 * evaluated(folder)["tasks"]["piqa"]["value"])
        half = T_2 * piqa.std(ddof=1) / math.sqrt(3)
        assert page.cell("table-1", name, "PIQA") == f"{piqa.mean():.1f} ± {half:.1f}"
        assert page.cell("table-1", name, "Seeds") == "3"


def test_the_average_is_over_the_papers_six_tasks(study):
    root, page = study
    six = ("winogrande", "piqa", "hellaswag", "arc_challenge", "arc_easy", "boolq")
    means = values(root, "affine", lambda f: np.mean([100 * evaluated(f)["tasks"][task]["value"] for task in six]))
    assert plain(page.cell("table-1", "affine", "Avg.")) == pytest.approx(means.mean(), abs=0.051)


def test_extra_parameters_are_counted_against_the_baseline(study):
    _, page = study
    extra = 3 * Mechanism.named("affine").extra_parameters(128, 8, 16)
    assert page.cell("table-1", "affine", "Δ params (M)") == f"{extra / 1e6:.3f}"
    assert page.cell("table-1", "softmax", "Δ params (M)") == "0.000"


def test_differences_are_paired_by_seed(study):
    root, page = study
    losses = np.array([values(root, name, last_loss) for name in ("softmax", "sink", "affine", "affine_gated")])
    gaps = losses[2] - losses[0]
    residuals = losses - losses.mean(1, keepdims=True) - losses.mean(0, keepdims=True) + losses.mean()
    # Student's t of (4 - 1) (3 - 1) degrees of freedom: the error term of all mechanisms with several seeds.
    half = 2.4469118511449692 * math.sqrt((residuals**2).sum() / 6 * 2 / 3)
    expected = f"{gaps.mean():+.3f} ± {half:.3f}".replace("-", "−")
    assert page.cell("deltas", "affine", "Δ Loss") == expected
    (view,) = [view for view in page.figure("forest")["views"] if view["name"] == "Loss"]
    rows = {row["name"]: row for row in view["rows"]}
    assert rows["affine"]["low"] == pytest.approx(gaps.mean() - half, rel=1e-4)
    assert rows["affine"]["high"] == pytest.approx(gaps.mean() + half, rel=1e-4)
    assert rows["affine"]["seeds"] == 3


def test_with_one_seed_there_is_a_standard_error_and_no_interval(study):
    root, page = study
    value = 100 * evaluated(root / "gated-0")["tasks"]["piqa"]["value"]
    assert page.cell("table-2", "gated", "PIQA") == f"{value:.1f} (1.2)"
    assert "±" not in page.cell("deltas", "gated", "Δ Loss")
    rows = {row["name"]: row for row in page.figure("forest")["views"][0]["rows"]}
    assert rows["gated"]["low"] is None


def test_table_2_has_the_gated_ones_and_the_baseline(study):
    _, page = study
    assert [row[0] for row in page.tables["table-2"][1:]] == ["softmax", "gated", "affine_gated"]
    assert [row[0] for row in page.tables["table-1"][1:]] == ["softmax", "sink", "affine"]


def test_tables_4_and_5_are_the_statistics_of_the_norms(study):
    root, page = study

    def norms(folder):
        return np.array([json.loads(line)["grad_norm"] for line in (folder / "log.jsonl").read_text().splitlines()])

    means = values(root, "sink", lambda folder: norms(folder).mean())
    variation = values(root, "sink", lambda folder: norms(folder).std() / norms(folder).mean())
    assert plain(page.cell("table-4", "sink", "Mean")) == pytest.approx(means.mean(), abs=6e-5)
    assert plain(page.cell("table-4", "sink", "CV")) == pytest.approx(variation.mean(), abs=6e-5)

    def spikes(folder):
        g = norms(folder)
        return (g > np.median(g) + 6 * np.median(abs(g - np.median(g)))).sum()

    assert plain(page.cell("table-5", "sink", "Spikes (k = 6)")) == round(values(root, "sink", spikes).mean())
    assert "Fewer than 500 steps in every run here" in page.text


def test_table_3_needs_both_activations(study, tmp_path):
    _, page = study
    assert "table-3" not in page.tables
    assert "mechanism.activation=sigmoid" in page.text
    sigmoid = Mechanism.named("affine", bias_length=256, activation="sigmoid")
    both = [make_run(tmp_path / "a", "affine", steps=20), make_run(tmp_path / "b", sigmoid, steps=20)]
    page = Page(render(load_runs(both)))
    assert [row[2] for row in page.tables["table-3"][1:]] == ["linear_clipping", "sigmoid"]


def test_the_papers_numbers_are_shown_only_for_its_own_setting(study, tmp_path):
    _, page = study
    assert "paper" not in page.kinds["table-1"]
    assert "No run here has that setting" in page.text
    folders = []
    for name in ("softmax", "affine"):
        folder = make_run(tmp_path / name, name, steps=30)
        (folder / "recipe.json").write_text(json.dumps(paper_1b(name).to_dict()))
        folders.append(folder)
    page = Page(render(load_runs(folders)))
    assert page.cell("table-1", "paper: Affine-Scaled", "Avg.") == "57.2"
    assert page.cell("table-1", "paper: Affine-Scaled", "c4 word PPL") == "58.9"
    assert page.cell("table-1", "paper: Baseline", "Loss") == "2.73"
    assert page.cell("table-4", "paper: Baseline", "Variance") == "3.934"
    assert page.cell("table-5", "paper: Affine-Scaled", "Spikes (k = 9)") == "27"
    assert page.kinds["table-1"].count("paper") == 2


def test_the_papers_own_tables_are_always_there(study):
    _, page = study
    body = page.tables["paper-table-1"][1:]
    assert len(body) == 9
    assert body[8] == [
        "3B",
        "Affine-Scaled",
        "2.1",
        "2.64",
        "40.8",
        "61.0",
        "74.8",
        "62.0",
        "41.5",
        "69.9",
        "65.1",
        "62.4",
    ]
    assert page.tables["paper-table-3"][1:] == [["1B", "sigmoid", "57.6"], ["1B", "linear_clipping", "58.0"]]
    assert page.tables["paper-table-4"][3] == ["0.5B", "Affine-Scaled", "0.561", "0.451", "0.203", "0.8", "42", "22"]


def test_several_recipes_have_a_column(tmp_path):
    folders = [make_run(tmp_path / name, "softmax", steps=20, name=name) for name in ("one", "two")]
    page = Page(render(load_runs(folders)))
    assert page.tables["table-1"][0][1] == "Recipe"
    assert [row[1] for row in page.tables["table-1"][1:]] == ["one", "two"]


def test_an_unfinished_group_has_no_difference_and_is_never_the_best(tmp_path):
    folders = [
        make_run(tmp_path / "a", "softmax", steps=30, planned=90),
        make_run(tmp_path / "s", "sink", steps=30, planned=90),
    ]
    folders.append(make_run(tmp_path / "b", "affine", steps=30, planned=90, finished=False))
    source = render(load_runs(folders))
    page = Page(source)
    assert page.cell("table-1", "affine", "Seeds") == "1 unfinished"
    assert "<b>" not in next(row for row in source.split("<tr") if ">affine</th>" in row and "unfinished" in row)
    assert [row[0] for row in page.tables["deltas"][1:]] == ["sink"]
