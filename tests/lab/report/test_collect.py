import json
import lzma
import math

import numpy as np
import pytest

from affine_attention.lab.report import report
from affine_attention.lab.report.collect import grid, load_run, load_runs, number

from .folders import make_run


def test_a_whole_run_is_read(tmp_path):
    run = load_run(make_run(tmp_path / "one", "affine", seed=3, steps=40, layers=2, heads=3))
    assert (run.name, run.mechanism_name, run.seeds, run.steps, run.status) == ("one", "affine", (3, 3), 40, "finished")
    assert run.problems == []
    assert run.tokens == 40 * 16 * 256
    steps, losses = run.series("loss")
    written = [json.loads(line)["loss"] for line in (tmp_path / "one" / "log.jsonl").read_text().splitlines()]
    assert steps.tolist() == list(range(1, 41))
    assert losses.tolist() == written
    assert run.series("eval_loss")[0].tolist() == [40]
    steps, logits = run.probes("mean_logit")
    assert steps.tolist() == [1, 10, 20, 30, 40]
    assert logits.shape == (5, 2, 3)
    assert run.inspected("entropy", "softmax").shape == (2, 3)
    assert sorted(run.maps()) == [0, 1]
    assert run.maps()[0].shape == (3, 32, 32)


def test_half_a_line_at_the_end_and_a_broken_one_inside_are_noted(tmp_path):
    folder = make_run(tmp_path / "killed", steps=20, finished=False)
    log = (folder / "log.jsonl").read_text().splitlines()
    log[4] = log[4][:10]
    (folder / "log.jsonl").write_text("\n".join(log) + '\n{"step": 21, "lo')
    run = load_run(folder)
    assert run.steps == 20
    assert 5 not in run.series("loss")[0]
    assert run.problems == ["2 broken lines of log.jsonl left out"]


def test_steps_that_were_run_again_count_once(tmp_path):
    folder = make_run(tmp_path / "resumed", steps=5)
    with open(folder / "log.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, "loss": 9.0}) + "\n")
    steps, losses = load_run(folder).series("loss")
    assert steps.tolist() == [1, 2, 3, 4, 5]
    assert losses[2] == 9.0


def test_null_and_nan_stay_as_holes(tmp_path):
    folder = make_run(tmp_path / "nan", steps=3)
    (folder / "log.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": null}\n{"step": 3, "loss": 1.5}\n')
    steps, losses = load_run(folder).series("loss")
    assert steps.tolist() == [1, 2, 3]
    assert np.isnan(losses[:2]).all()
    assert losses[2] == 1.5


def test_layers_that_a_probe_lacks_are_nan(tmp_path):
    folder = make_run(tmp_path / "holes", steps=1)
    lines = [{"step": 1, "mean_logit": [[1.0, 2.0], [3.0, 4.0]]}, {"step": 2, "mean_logit": [[5.0], None]}]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, values = load_run(folder).probes("mean_logit")
    assert values.shape == (2, 2, 2)
    assert values[1, 0, 0] == 5.0
    assert np.isnan(values[1].ravel()[1:]).all()


def test_a_recipe_alone_is_a_run_that_has_not_started(tmp_path):
    folder = make_run(tmp_path / "full", steps=3)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "recipe.json").write_text((folder / "recipe.json").read_text())
    run = load_run(bare)
    assert run.status == "not started"
    assert math.isnan(run.tokens)
    assert run.maps() == {}
    assert run.map_tokens == []
    assert run.inspected("entropy", "softmax") is None


@pytest.mark.parametrize("name", ["manifest.json", "evaluation.json", "inspection.json"])
@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_a_broken_file_is_noted_and_left_out(tmp_path, name, content):
    folder = make_run(tmp_path / "broken", steps=3)
    (folder / name).write_text(content)
    run = load_run(folder)
    assert len(run.problems) == 1
    assert name in run.problems[0]


def test_broken_maps_are_noted(tmp_path):
    folder = make_run(tmp_path / "broken", steps=3)
    (folder / "inspection" / "maps.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    run = load_run(folder)
    assert run.maps() == {}
    assert "maps.safetensors" in run.problems[0]


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([{"event": "start"}], "unfinished at step 4 of 50"),
        ([{"event": "start"}, {"event": "stop"}], "stopped at step 4 of 50"),
        ([{"event": "start"}, {"event": "error"}], "failed at step 4 of 50"),
        ([{"event": "start"}, {"event": "finish"}], "finished"),
    ],
)
def test_the_status_follows_the_events(tmp_path, events, status):
    folder = make_run(tmp_path / "run", steps=4, planned=50, finished=False)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert load_run(folder).status == status


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty.*recipe\.json"):
        load_run(tmp_path / "empty")
    (tmp_path / "empty" / "recipe.json").write_text("{oops")
    with pytest.raises(ValueError, match=r"empty/recipe\.json is not JSON"):
        load_run(tmp_path / "empty")
    (tmp_path / "empty" / "recipe.json").write_text("[]")
    with pytest.raises(ValueError, match="table of settings"):
        load_run(tmp_path / "empty")


def test_a_folder_given_twice_is_read_once(tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    assert len(load_runs([folder, str(folder), folder / ".." / "run"])) == 1
    assert len(load_runs(folder)) == 1


def test_numbers_and_grids_take_anything():
    assert math.isnan(number("3"))
    assert math.isnan(number(True))
    assert math.isnan(number(float("inf")))
    assert number(3) == 3.0
    assert grid(None).size == 0
    assert grid([1.0, None, 3.0]).shape == (3, 1)
    assert np.isnan(grid([[1.0], "x", None, [2.0, 3.0]])).sum() == 5


def test_one_unreadable_run_does_not_stop_the_report(tmp_path):
    good, bad = make_run(tmp_path / "good", "softmax", steps=5), make_run(tmp_path / "bad", "affine", steps=5)
    (bad / "recipe.json").write_text("[" * 100_000)
    (good / "evaluation.json").write_text("{")
    page = report([good, bad], tmp_path / "page.html", markdown=tmp_path / "page.md").read_text()
    for text in (page, (tmp_path / "page.md").read_text()):
        assert "unreadable" in text
        assert "nested too deeply" in text
        assert "evaluation.json" in text
    with pytest.raises(ValueError, match="nested too deeply"):
        report([bad], tmp_path / "page.html")


def test_a_name_of_megabytes_is_unreadable(tmp_path):
    good, bad = make_run(tmp_path / "good", "softmax", steps=5), make_run(tmp_path / "bad", "affine", steps=5)
    recipe = json.loads((bad / "recipe.json").read_text())
    (bad / "recipe.json").write_text(json.dumps(recipe | {"name": "n" * 20 * 2**20}))
    page = report([good, bad], tmp_path / "page.html").read_text()
    assert "must hold at most 1,048,576 bytes" in page
    assert len(page) < 2**20


def test_archives_that_expand_without_end_are_noted(tmp_path):
    run = make_run(tmp_path / "run", "affine", steps=5)
    bomb = lzma.compress(bytes(600 * 2**20), preset=0)
    for name in ("manifest.json", "log.jsonl", "evaluation.json"):
        (run / name).unlink()
        (run / f"{name}.xz").write_bytes(bomb)
    assert sum("when it is unpacked" in problem for problem in load_run(run).problems) == 3


def test_a_grid_holds_no_more_than_it_says():
    assert grid([[1.0] * 100_000, *([[]] * 100_000)]).size == 0
    assert grid([[1.0, 2.0], [3.0]]).shape == (2, 2)
