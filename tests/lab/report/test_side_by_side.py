import subprocess
import sys

import pytest

from affine_attention.lab.report import compare_runs

from .folders import make_run
from .patching import set_inspection, set_loss, set_perplexity


def row(text, name):
    """The cells of a line; columns are separated by two spaces or more."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return [cell for cell in line[len(name) :].split("  ") if cell.strip()]


def test_settings_and_results_that_differ_are_shown(tmp_path):
    first = set_perplexity(set_loss(make_run(tmp_path / "a", "softmax", steps=20), 2.0), 100.0)
    second = set_perplexity(set_loss(make_run(tmp_path / "b", "affine", steps=20, learning_rate=0.002), 1.5), 50.0)
    text = compare_runs([first, second])
    assert [cell.strip() for cell in row(text, "learning_rate")] == ["0.001", "0.002"]
    assert [cell.strip() for cell in row(text, "mechanism.name")] == ["softmax", "affine"]
    assert "save_every" not in text
    assert [cell.strip() for cell in row(text, "Loss")] == ["2.000", "1.500", "−0.500"]
    assert [cell.strip() for cell in row(text, "ln c4 word PPL")] == ["4.6052", "3.9120", "−0.6931"]
    assert "Clipped %, steps 0–100" in text
    assert "Entropy of softmax part" in text
    assert "Tokens/s" in text
    assert "differences of single runs have no interval" in text


def test_three_runs_are_compared_with_the_first(tmp_path):
    folders = [set_loss(make_run(tmp_path / f"run{seed}", "affine", seed, steps=20), 2.0 + seed) for seed in range(3)]
    text = compare_runs(folders)
    assert [cell.strip() for cell in row(text, "Loss")] == ["2.000", "3.000", "+1.000", "4.000", "+2.000"]
    assert [cell.strip() for cell in row(text, "seed")] == ["0", "1", "2"]


def test_what_makes_runs_incomparable_is_said(tmp_path):
    first = make_run(tmp_path / "a", "softmax", steps=20, teacher="teacher")
    second = make_run(tmp_path / "b", "affine", steps=12, planned=20, finished=False, inspected=False)
    text = compare_runs([first, second])
    assert "note: not finished: b (unfinished at step 12 of 20)" in text
    assert "note: the objective differs, so the losses are not comparable; perplexities are" in text
    assert "note: the runs have seen different numbers of tokens" in text
    assert [cell.strip() for cell in row(text, "Entropy of weights")][1:] == ["–", "–"]


def test_the_sink_rate_is_shown_where_it_is_stored(tmp_path):
    folders = [make_run(tmp_path / name, name, steps=10) for name in ("softmax", "affine")]
    assert "Sink rate" not in compare_runs(folders)
    set_inspection(folders[0], sink_rate={"rate": {"weights": 0.5, "softmax": 0.25}})
    assert [cell.strip() for cell in row(compare_runs(folders), "Sink rate %, w")] == ["50.0", "–", "–"]


def test_one_run_and_a_folder_without_a_run_are_refused(tmp_path):
    folder = make_run(tmp_path / "a", "softmax", steps=5)
    with pytest.raises(ValueError, match="compare needs 2 to 12 different runs, got 1"):
        compare_runs([folder, folder])
    with pytest.raises(FileNotFoundError, match="does not hold a run"):
        compare_runs([folder, tmp_path])


def test_names_cannot_change_the_terminal(tmp_path):
    folders = [make_run(tmp_path / name, "softmax", seed, steps=5) for seed, name in enumerate(("a\x1b[31m", "b"))]
    assert "\x1b" not in compare_runs(folders)


def test_it_needs_no_torch(tmp_path):
    folders = [str(make_run(tmp_path / name, name, steps=5)) for name in ("softmax", "affine")]
    code = (
        "import sys; from affine_attention.cli import main; "
        "assert main(['compare', *sys.argv[1:]]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *folders], check=True, capture_output=True, timeout=60)
