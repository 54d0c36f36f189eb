import json

import pytest

from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.runs import (
    details_of_runs,
    flat,
    made_table,
    missing_html,
    perplexity_table,
    runs_table,
)

from .folders import make_run
from .reading import Page


def groups_of(*folders):
    return group_runs(load_runs(folders))


def cells(table):
    return [[cell.text for cell in row.cells] for row in table.rows]


def test_the_runs_and_how_far_they_came(tmp_path):
    done = make_run(tmp_path / "done", "affine", seed=4, steps=100)
    manifest = json.loads((done / "manifest.json").read_text())
    (done / "manifest.json").write_text(json.dumps(manifest | {"train_tokens": 204_800}))
    half = make_run(tmp_path / "half", "sink", steps=30, planned=100, finished=False, evaluated=False)
    rows = cells(runs_table(groups_of(done, half)))
    assert rows[0][:7] == ["half", "tiny_cpu", "sink", "0", "30 / 100", "123k", "–"]
    assert rows[0][10:] == ["unfinished at step 30 of 100", "inspected"]
    assert rows[1][:7] == ["done", "tiny_cpu", "affine", "4", "100 / 100", "410k", "2.00"]
    assert rows[1][7] == "1M"
    assert rows[1][9:] == ["8 s", "finished", "evaluated, inspected"]


def test_perplexity_in_all_forms(tmp_path):
    folder = make_run(tmp_path / "a", steps=2)
    entry = json.loads((folder / "evaluation.json").read_text())["perplexity"]["c4"]
    (row,) = cells(perplexity_table(groups_of(folder)))
    assert row[2:7] == [
        "c4", f"{entry['token']:.3f}", f"{entry['word']:.3f}", f"{entry['byte']:.4f}", f"{entry['bits_per_byte']:.4f}"
    ]  # fmt: skip
    assert row[7:] == ["0.0110", "50,000", "40,000", "120"]


def test_runs_made_alike_share_a_row(tmp_path):
    folders = [make_run(tmp_path / name, name, steps=2) for name in ("softmax", "affine", "sink")]
    (row,) = cells(made_table(groups_of(*folders)))
    assert row[0] == "all 3 runs"
    assert row[5] == "9e107d9d372b"
    assert row[6] == "composed: the tensors are on the CPU"
    manifest = json.loads((folders[1] / "manifest.json").read_text())
    (folders[1] / "manifest.json").write_text(json.dumps(manifest | {"device": "NVIDIA H200"}))
    rows = cells(made_table(groups_of(*folders)))
    assert [row[:2] for row in rows] == [["softmax, sink", "cpu, x86_64, 2 cores"], ["affine", "NVIDIA H200"]]


def test_every_setting_is_in_the_details(tmp_path):
    text = Page(details_of_runs(groups_of(make_run(tmp_path / "a", steps=2, learning_rate=0.0042)))).text
    for words in (
        "learning_rate0.0042",
        "mechanism.momentum0.9",
        "versions.torch2.13.0",
        "attention.whythe tensors",
    ):
        assert words in text


@pytest.mark.parametrize("folder", ["plain", "with space; rm -rf $HOME"])
def test_what_is_missing_names_the_command(tmp_path, folder):
    path = make_run(tmp_path / folder, steps=2, planned=20, finished=False, evaluated=False, inspected=False)
    text = Page(missing_html(groups_of(path))).text
    quoted = f"'{path}'" if " " in folder else str(path)
    assert f"affine evaluate {quoted}" in text
    assert f"affine inspect {quoted}" in text
    assert "python -m affine_attention train --recipe tiny_cpu resumes" in text, "the command of the manifest"


def test_nothing_missing_has_a_note(tmp_path):
    assert "Nothing is missing" in missing_html(groups_of(make_run(tmp_path / "a", steps=2)))


def test_nested_tables_are_flat():
    assert flat({"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": {}}) == {
        "a.b": "1", "a.c.d": "null", "e": "[1, 2]", "f": "{}",
    }  # fmt: skip


def test_runs_of_different_data_are_named(tmp_path):
    folders = [make_run(tmp_path / name, name, steps=2) for name in ("softmax", "affine")]
    manifest = json.loads((folders[1] / "manifest.json").read_text())
    (folders[1] / "manifest.json").write_text(json.dumps(manifest | {"data": {"fingerprint": "other"}}))
    assert "tiny_cpu: its runs were trained on 2 different data sets" in Page(missing_html(groups_of(*folders))).text
