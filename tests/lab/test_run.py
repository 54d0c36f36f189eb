"""The files of a run folder, and errors about them."""

from __future__ import annotations

import lzma
import math

import pytest

from affine_attention.files import read_json, write_json
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder, open_run


def test_what_is_not_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a folder"):
        open_run(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"no recipe\.json"):
        open_run(tmp_path)
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        open_run(tmp_path).recipe()


def test_an_empty_folder_name_is_rejected():
    with pytest.raises(ValueError, match="must not be an empty string"):
        RunFolder("")


def test_a_run_stores_its_recipe_and_events(tmp_path):
    run = RunFolder(tmp_path / "run")
    assert not run.exists
    assert run.log() == []
    write_json(run.recipe_file, Recipe(steps=300).to_dict())
    run.add_event("start", step=0)
    run.add_event("stop", loss=math.nan)
    assert open_run(run.path).recipe() == Recipe(steps=300)
    assert not run.finished
    assert [(event["event"], event.get("loss")) for event in run.events()] == [("start", None), ("stop", None)]


def test_a_stored_run_may_be_compressed(tmp_path):
    run = RunFolder(tmp_path)
    lines = "".join(f'{{"step": {step}, "loss": {1 / step}}}\n' for step in (1, 2, 3))
    run.log_file.with_name("log.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    run.inspection_file.with_name("inspection.json.xz").write_bytes(lzma.compress(b'{"layers": 2}'))
    assert [line["step"] for line in run.log()] == [1, 2, 3]
    assert read_json(run.inspection_file) == {"layers": 2}
    run.log_file.write_text('{"step": 9}\n')  # the plain file is the newer one
    assert run.log() == [{"step": 9}]
    run.inspection_file.with_name("inspection.json.xz").write_bytes(b"not compressed")
    with pytest.raises(ValueError, match=r"inspection\.json\.xz cannot be decompressed"):
        read_json(run.inspection_file)
