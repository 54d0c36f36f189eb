"""The reports of E1, E2, E4 and E5 on constructed runs: every verdict of a design, missing runs, trials, archives."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from studies.experiments import cost, design_runs, e1_report, e2_report, e4_report, e5_report
from studies.experiments.report import main, report
from studies.experiments.run import pack

SEEDS = (0, 1, 2)


def write_run(folder, recipe, loss, *, steps=3, norms=(0.5,), events=("finish",), inspection=None, evaluation=None):
    """A run folder with the files that run.py leaves: the last line of the log has the held-out loss."""
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    lines = [{"step": n + 1, "loss": 7.6, "grad_norm": norms[n % len(norms)]} for n in range(steps)]
    if loss is not None:
        lines[-1]["eval_loss"] = loss
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [{"event": "start"}, *({"event": event} if isinstance(event, str) else event for event in events)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in found))
    for name, table in (("inspection", inspection), ("evaluation", evaluation)):
        if table is not None:
            (folder / f"{name}.json").write_text(json.dumps(table))


def noisy(means, noise=0.002, seed=0):
    """A loss for every cell and seed: its mean, an effect of the seed that all cells share, and a residual."""
    draw = np.random.default_rng(seed)
    return {
        f"{cell}-seed{s}": mean + 0.05 * s + noise * float(draw.standard_normal())
        for cell, mean in means.items()
        for s in SEEDS
    }


def row_of(text, test):
    """(statistic, verdict, remark) of a row of the table of verdicts."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {test}")]
    _, _, statistic, verdict, remark, _ = (part.strip() for part in line.split("|"))
    return statistic, verdict.strip("*"), remark


# ---------------------------------------------------------------------------------------------------------------- E1

USUAL_E1 = {"softmax": 1.93, "affine": 1.72, "affine_no_bias": 1.71, "head_gated": 1.70}


def made_e1(c=1.75, d=1.80, e=1.80, f=1.60, h=1.70, i=1.75):
    letters = {"a": 1.8, "b": 1.9, "c": c, "d": d, "e": e, "f": f, "g": 1.7, "h": h, "i": i}
    return USUAL_E1 | {e1_report.LETTERS[letter]: loss for letter, loss in letters.items()}


@pytest.fixture
def e1(tmp_path):
    """Writes the runs of E1 with these losses; the stored study has the same softmax run, shifted by `shift`."""

    def write(losses, shift=0.0, repeat=False):
        recipes = design_runs.design("e1")
        for name, loss in losses.items():
            cell = name.rpartition("-seed")[0]
            if cell in e1_report.STORED_CELLS:
                write_run(tmp_path / "stored" / name, recipes["softmax-seed0"], loss + shift)
            if name in recipes or (repeat and cell in e1_report.STORED_CELLS):
                write_run(tmp_path / "runs" / name, recipes.get(name, recipes["softmax-seed0"]), loss)
        return tmp_path / "runs"

    return write


@pytest.fixture
def report_e1(tmp_path, monkeypatch):
    monkeypatch.setattr(e1_report, "STORED", tmp_path / "stored")
    return lambda runs: report("e1", [runs])


@pytest.mark.parametrize(
    ("losses", "noise", "expected"),
    [
        ({}, 0.002, ["confirmed"] * 5),
        ({"c": 1.90, "d": 1.70, "e": 1.70, "f": 1.80, "h": 1.95, "i": 1.72}, 0.002, ["refuted"] * 5),
        ({"c": 1.815, "d": 1.64, "e": 1.64, "f": 1.72, "h": 1.815, "i": 1.75}, 0.002,
         ["undecided", "undecided", "undecided", "no difference", "undecided"]),
        ({"c": 1.80, "d": 1.72, "e": 1.72, "f": 1.70, "h": 1.80}, 0.12, ["undecided"] * 5),
    ],
)  # fmt: skip
def test_e1_reaches_every_verdict(e1, report_e1, losses, noise, expected):
    text = report_e1(e1(noisy(made_e1(**losses), noise)))
    assert row_of(text, "H0")[1] == "confirmed"
    assert [row_of(text, f"H{n}")[1] for n in range(1, 6)] == expected
    assert "missing" not in text
    assert "trial" not in text


def test_e1_a_small_positive_difference_is_confirmed_and_called_small(e1, report_e1):
    _, verdict, remark = row_of(report_e1(e1(noisy(made_e1(d=1.72), 0.001))), "H2")
    assert verdict == "confirmed"
    assert remark.startswith("by less than 0.04")


def test_e1_has_the_numbers_of_the_contrasts(e1, report_e1):
    losses = noisy(made_e1())
    text = report_e1(e1(losses))

    def mean(cell):
        return np.mean([losses[f"{cell}-seed{seed}"] for seed in SEEDS])

    first = mean("constant_alpha") - (mean("softmax") + mean("head_gated")) / 2
    assert row_of(text, "H1")[0].startswith(f"{first:+.3f}".replace("-", "−"))
    better = min(mean(e1_report.LETTERS["i"]), mean("head_gated"))
    last = mean(e1_report.LETTERS["h"]) - better - (mean("softmax") - mean("head_gated")) / 2
    assert row_of(text, "H5")[0].startswith(f"{last:+.3f}".replace("-", "−"))
    # 13 students x 3 seeds: 39 values, 13 + 2 parameters.
    assert "24 degrees of freedom" in text


def test_e1_waits_if_the_stored_runs_are_not_comparable(e1, report_e1):
    text = report_e1(e1(noisy(made_e1()), shift=0.03))
    _, verdict, remark = row_of(text, "H0")
    assert verdict == "refuted"
    assert "affine-seed0" in remark
    assert "softmax-seed0" not in remark
    assert {row_of(text, f"H{n}")[1] for n in range(1, 6)} == {"waits for H0"}


def test_e1_uses_repeated_runs_instead_of_the_stored_ones(e1, report_e1):
    text = report_e1(e1(noisy(made_e1()), shift=0.03, repeat=True))
    assert row_of(text, "H0")[1] == "stored runs are not used"
    assert [row_of(text, f"H{n}")[1] for n in range(1, 6)] == ["confirmed"] * 5


def test_e1_names_missing_and_unfinished_runs_and_trials(e1, report_e1):
    runs = e1(noisy(made_e1()))
    shutil.rmtree(runs / "constant_alpha-seed2")
    (runs / "affine_centred-seed1/events.jsonl").write_text('{"event": "start"}\n')
    recipe = json.loads((runs / "head_gated_double-seed0/recipe.json").read_text()) | {
        "weight_decay": 0.2,
        "data": ["x"],
    }
    (runs / "head_gated_double-seed0/recipe.json").write_text(json.dumps(recipe))
    text = report_e1(runs)
    assert "2 of 28 runs are missing: " in text
    assert "constant_alpha-seed2 (not started)" in text
    assert "affine_centred-seed1 (unfinished at step 3 of 1200)" in text
    assert "they differ from the design in weight_decay." in text
    assert row_of(text, "H1")[1:] == ("runs are missing", "needs constant_alpha-seed2")
    assert row_of(text, "H2")[1] == "confirmed"


def test_e1_without_any_run_prints_what_is_missing(tmp_path, capsys):
    main(["e1", str(tmp_path)])
    text = capsys.readouterr().out
    assert "28 of 28 runs are missing" in text
    assert row_of(text, "H0")[1] == "runs are missing"


# ---------------------------------------------------------------------------------------------------------------- E2


def inspection_of(share, spread):
    return {
        "first_token": {"mean": [[share, share]], "softmax": [[share, share]]},
        "alpha": {"mean": [[1.0, 1.0]], "std": [[spread, spread]]},
        "sink_rate": {"rate": {"softmax": 0.5, "weights": 0.5}},
    }


def write_e2(folder, shares, costs=None, losses=None, spread=0.2, noise=0.004):
    """Runs of E2: `shares` has the first-token share of each cell, costs and losses those of some cells."""
    draw = np.random.default_rng(0)
    for name, recipe in design_runs.design("e2").items():
        cell = design_runs.split_name(name)[0]
        wobble = noise * float(draw.standard_normal())
        variants = {"a8_tensor": {"delta": (costs or {}).get(cell, 0.8) + wobble}}
        write_run(
            folder / name, recipe, (losses or {}).get(cell, 0.05) + wobble / 10,
            inspection=inspection_of(shares[cell] + wobble, spread),
            evaluation={"instruments": {"quantisation": {"variants": variants}}},
        )  # fmt: skip
    return folder


def shares_of(softmax=0.33, affine=0.10, gate=0.20, gated=0.2, pressed=None):
    """`pressed` are the shares under pressure, by default the same, except for softmax."""
    plain = {"softmax": softmax, "affine": affine, "head_gated": gate, "gated": gated}
    pressed = plain | {"softmax": softmax} | (pressed or {})
    return plain | {f"{name}_sink_pressure=first_key": share for name, share in pressed.items()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"shares": shares_of(pressed={"softmax": 0.32}), "costs": {"affine": 0.1}},
         {"H1": "confirmed", "H2": "confirmed", "H3": "confirmed", "H4": "undecided", "H5": "confirmed"}),
        ({"shares": shares_of(affine=0.40, pressed={"softmax": 0.34}), "spread": 0.001},
         {"H1": "refuted", "H2": "refuted", "H3": "refuted", "H4": "refuted", "H5": "refuted"}),
        ({"shares": shares_of(affine=0.25, pressed={"softmax": 0.10, "affine": 0.09}), "costs": {"affine": 0.4},
              "spread": 0.03},
         {"H1": "undecided", "H2": "undecided", "H3": "undecided", "H4": "confirmed", "H5": "undecided"}),
    ],
)  # fmt: skip
def test_e2_reaches_every_verdict(tmp_path, given, expected):
    text = report("e2", [write_e2(tmp_path / "runs", **given)])
    assert {test: row_of(text, f"{test}, α is used (plain)" if test == "H5" else test)[1] for test in expected} == (
        expected
    )
    assert "missing" not in text
    assert "trial" not in text


def test_e2_a_cheap_model_with_a_worse_loss_is_not_confirmed(tmp_path):
    runs = write_e2(tmp_path / "runs", shares_of(), costs={"affine": 0.1}, losses={"affine": 0.08})
    assert row_of(report("e2", [runs]), "H3")[1] == "undecided"


def test_e2_noise_is_the_difference_between_seeds(tmp_path):
    runs = write_e2(tmp_path / "runs", shares_of())
    found = {name: json.loads((runs / name / "inspection.json").read_text()) for name in design_runs.design("e2")}
    pairs = {}
    for name, inspection in found.items():
        pairs.setdefault(design_runs.split_name(name)[0], []).append(inspection["first_token"]["softmax"][0][0])
    variance = np.mean([(a - b) ** 2 / 2 for a, b in pairs.values()])
    with design_runs.run_folders([runs]) as folders:
        collected = design_runs.collect(design_runs.design("e2"), folders)
    deviation, freedom = e2_report.noise_of(collected.values(e2_report.first_token_of_softmax))
    assert deviation == pytest.approx(variance**0.5)
    assert freedom == 8


def test_e2_says_what_follows_for_the_paper(tmp_path):
    supported = report("e2", [write_e2(tmp_path / "a", shares_of())])
    assert "The paper's account is supported without pressure." in supported
    assert "it is the gate" not in supported
    gate = report("e2", [write_e2(tmp_path / "b", shares_of(gate=0.12, affine=0.05))])
    assert "head_gated falls below half of softmax without pressure as well: it is the gate" in gate
    alone = report("e2", [write_e2(tmp_path / "c", shares_of(pressed={"softmax": 0.1, "affine": 0.01, "gate": 0.1}))])
    assert "is not supported (softmax does so too) under pressure" in alone
    worse = write_e2(tmp_path / "d", shares_of(), losses={"affine": 0.1})
    assert re.search(r"is not supported \(the loss is \+0\.0\d+ nats above the control\)", report("e2", [worse]))


def test_e2_reads_one_archive_per_seed(tmp_path):
    runs = write_e2(tmp_path / "runs", shares_of())
    whole = report("e2", [runs])
    archives = []
    for seed in (0, 1):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        for path in runs.glob(f"*-seed{seed}"):
            shutil.copytree(path, folder / path.name)
        archives.append(tmp_path / f"e2-seed{seed}.tar.xz")
        pack(folder, archives[-1])
    assert report("e2", archives) == whole
    one = report("e2", archives[:1])
    assert "8 of 16 runs are missing" in one
    assert row_of(one, "H1")[1] == "runs are missing"
    assert "No conclusion" in one
    with pytest.raises(ValueError, match="is finished in two of the given places"):
        report("e2", [runs, archives[0]])
    with pytest.raises(ValueError, match=r"RUNS must be a folder of runs or an archive of run\.py"):
        report("e2", [tmp_path / "nothing"])


# ---------------------------------------------------------------------------------------------------------------- E4


def summaries(slopes, clipped=None, noise=0.01):
    """The loss of a mechanism rises by its slope per step of the rate from 2e-3 in both directions."""
    draw = np.random.default_rng(1)
    return [
        {"mechanism": mechanism, "learning_rate": rate, "seed": seed, "untrained_loss": 7.6,
         "eval_loss": 3 + slopes.get(mechanism, 0.3) * abs(place - 2) + 0.1 * seed + noise * draw.standard_normal(),
         "clipped_share": (clipped or {}).get(mechanism, 0.5) + 0.01 * place}
        for seed in (0, 1)
        for place, rate in enumerate(e4_report.RATES)
        for mechanism in e4_report.E4_MECHANISMS
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("affine", "share", "noise", "expected"),
    [
        (0.1, 0.2, 0.01, ["confirmed"] * 4),
        (0.5, 0.8, 0.01, ["refuted"] * 4),
        (0.3, 0.5, 0.1, ["no evidence", "no evidence", "no evidence", "undecided"]),
    ],
)
def test_e4_reaches_every_verdict(affine, share, noise, expected):
    found = e4_report.tests(summaries({"affine": affine}, {"affine": share}, noise))
    assert [verdict.verdict for verdict in found] == expected


def test_e4_reads_runs_and_counts_a_diverged_run_as_untrained(tmp_path):
    recipes = design_runs.design("e4")
    stop = {"event": "stop", "reason": "NotFiniteError: the loss is not finite"}
    for line in summaries({"softmax": 0.4, "affine": 0.1}, {"affine": 0.2}):
        name = f"{line['mechanism']}_learning_rate={line['learning_rate']}-seed{line['seed']}"
        diverges = name == "softmax_learning_rate=0.008-seed1"
        norms = [0.5] * 100 + [0.5 if line["mechanism"] == "affine" else 2.0]  # after 100 warm-up steps
        write_run(tmp_path / name, recipes[name], None if diverges else line["eval_loss"], norms=norms, steps=101,
                  events=[stop] if diverges else ["finish"])  # fmt: skip
    text = report("e4", [tmp_path])
    # One seed of a cell that diverged is residual variance: the pooled interval grows, as the design says.
    assert row_of(text, "H1")[1] == "no evidence"
    assert row_of(text, "H4")[1] == "confirmed"
    assert "Runs that became non-finite: 1." in text
    softmax = next(line for line in text.splitlines() if line.startswith("| softmax | "))
    assert float(softmax.split("|")[6]) == pytest.approx((7.6 + 3.8) / 2, abs=0.02)  # at 8e-3, with one diverged seed
    assert "| softmax | 100/100 %" in text

    # A run that was stopped otherwise has not diverged, and no verdict is given without it.
    (tmp_path / "softmax_learning_rate=0.008-seed1/events.jsonl").write_text('{"event": "stop", "reason": "SIGTERM"}\n')
    text = report("e4", [tmp_path])
    assert "1 of 50 runs are missing: softmax_learning_rate=0.008-seed1 (stopped at step 101 of 400)" in text
    assert row_of(text, "H1")[1] == "runs are missing"
    assert "| affine | 0.0005 | 0 |" in text


# ---------------------------------------------------------------------------------------------------------------- E5

LENGTHS = e5_report.LENGTHS


def losses_e5(gap=0.2, power=0.3, gate=0.0, noise=0.001, gaps=None, seed=0):
    """Softmax loses log D / 10 with the data; affine is g(D) below it, and `gate` below head_gated."""
    means = {}
    for steps in LENGTHS:
        growth = steps / LENGTHS[0]
        affine = gaps[LENGTHS.index(steps)] if gaps else gap * growth**-power
        softmax = 2 - 0.1 * np.log(growth)
        below = {"softmax": 0.0, "affine": affine, "head_gated": affine - gate, "affine+activation=sigmoid": affine}
        for mechanism, amount in below.items():
            means[e5_report.cell_of(mechanism, steps)] = softmax - amount
    return noisy(means, noise, seed)


def write_e5(folder, losses, rates=(0, 0, 0)):
    for name, recipe in design_runs.design("e5").items():
        seed = design_runs.split_name(name)[1]
        write_run(folder / name, recipe, losses[name],
                  inspection={"sink_rate": {"rate": {"softmax": rates[seed]}}})  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("given", "rates", "expected"),
    [
        ({"gate": 0.05}, (0.1, 0.02, 0.1), ["confirmed", "confirmed", "confirmed", "confirmed"]),
        ({"gaps": (0.002, 0.001, -0.05), "gate": -0.05, "noise": 0.0005}, (0, 0, 0),
         ["refuted", "confirmed", "refuted", "refuted"]),
        ({"power": 1.0}, (0.1, 0, 0), ["undecided", "confirmed", "no evidence", "undecided"]),
        ({"power": -0.2}, (0, 0, 0), ["confirmed", "refuted: it grows", "no evidence", "refuted"]),
        ({"power": 0.0, "noise": 0.02, "seed": 4}, (0, 0, 0),
         ["confirmed", "no shrinking shown", "no evidence", "refuted"]),
    ],
)  # fmt: skip
def test_e5_reaches_every_verdict(tmp_path, given, rates, expected):
    text = report("e5", [write_e5(tmp_path, losses_e5(**given), rates)])
    assert [row_of(text, f"H{n}")[1] for n in range(1, 5)] == expected
    assert "missing" not in text
    assert "trial" not in text


def test_e5_finds_the_power_of_a_gap(tmp_path):
    runs = write_e5(tmp_path, losses_e5(power=0.3, noise=1e-5))
    assert row_of(report("e5", [runs]), "H2")[0].startswith("p +0.300 ± 0.000")
    assert e5_report.slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]) == pytest.approx(2)


def test_e5_uses_the_slope_of_the_gap_if_one_is_not_positive(tmp_path):
    text = report("e5", [write_e5(tmp_path, losses_e5(gaps=(0.2, 0.1, -0.1)))])
    assert row_of(text, "H2")[0].startswith("− slope of g (a gap is not positive)")


def test_e5_with_one_seed_gives_no_verdict_and_prints_the_losses(tmp_path):
    runs = write_e5(tmp_path, losses_e5())
    for path in [*runs.glob("*-seed1"), *runs.glob("*-seed2")]:
        shutil.rmtree(path)
    text = report("e5", [runs])
    assert "24 of 36 runs are missing" in text
    assert [row_of(text, f"H{n}")[1] for n in range(1, 5)] == ["runs are missing"] * 4
    assert "| affine | 1.8" in text


@pytest.mark.parametrize(("name", "count"), [("e1", 28), ("e2", 16), ("e4", 50), ("e5", 36)])
def test_a_report_expects_the_runs_of_the_design(name, count):
    assert len(design_runs.design(name)) == count


def test_the_readme_has_the_estimated_minutes():
    page = (Path(cost.__file__).parent / "README.md").read_text()
    for experiment, planned in cost.PLANNED.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| [{experiment.upper()}]({experiment}.md) |")]
        *_, count, first, estimated, _ = [part.strip() for part in row.split("|")]
        assert count == str(len(design_runs.design(experiment)))
        assert first.split()[0] == str(planned)
        assert estimated == f"{cost.minutes(experiment):.0f}", "run `python -m studies.experiments.cost`"
