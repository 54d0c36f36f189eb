"""A run's files are whole or absent, and say what is wrong with them."""

from __future__ import annotations

import json
import lzma
import math

import pytest
import torch

from affine_attention.files import read_json, read_lines
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder, describe_machine, open_run, write_json


def test_json_is_strict_and_written_whole(tmp_path):
    path = tmp_path / "deep" / "file.json"
    write_json(path, {"a": math.nan, "b": [math.inf, 1.5], "c": torch.tensor([1.0, 2.0]), "d": tmp_path})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5],
        "c": [1.0, 2.0],
        "d": str(tmp_path),
    }
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    write_json(path.with_name("text.json"), {"token": "\ud83d \x00 </script>"})
    assert read_json(path.with_name("text.json")) == {"token": "? \x00 </script>"}
    path.with_name("text.json").unlink()
    assert read_json(path)["b"] == [None, 1.5], "the old file stays when the new one cannot be written"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_a_line_that_was_cut_off_is_not_a_step(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError) as error:
        list(read_lines(path))
    assert "line 2" in str(error.value)


def test_what_is_not_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a folder"):
        open_run(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"no recipe\.json"):
        open_run(tmp_path)
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        open_run(tmp_path).recipe()


def test_an_empty_name_is_no_folder():
    with pytest.raises(ValueError, match="got an empty name"):
        RunFolder("")


def test_a_run_remembers_its_recipe_and_events(tmp_path):
    run = RunFolder(tmp_path / "run")
    assert not run.exists
    assert run.log() == []
    write_json(run.recipe_file, Recipe(steps=300).to_dict())
    run.add_event("start", step=0)
    run.add_event("stop", loss=math.nan)
    assert open_run(run.path).recipe() == Recipe(steps=300)
    assert not run.finished
    assert [(event["event"], event.get("loss")) for event in run.events()] == [("start", None), ("stop", None)]


def test_the_machine_is_described():
    machine = describe_machine("cpu")
    assert torch.__version__.startswith(machine["versions"]["torch"].split("+")[0])
    assert machine["device"].startswith("cpu")


def test_a_kept_run_may_be_compressed(tmp_path):
    run = RunFolder(tmp_path)
    lines = "".join(f'{{"step": {step}, "loss": {1 / step}}}\n' for step in (1, 2, 3))
    run.log_file.with_name("log.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    run.inspection_file.with_name("inspection.json.xz").write_bytes(lzma.compress(b'{"layers": 2}'))
    assert [line["step"] for line in run.log()] == [1, 2, 3]
    assert read_json(run.inspection_file) == {"layers": 2}
    run.log_file.write_text('{"step": 9}\n')  # the plain file is the newer one
    assert run.log() == [{"step": 9}]
    run.inspection_file.with_name("inspection.json.xz").write_bytes(b"not compressed")
    with pytest.raises(ValueError, match=r"inspection\.json\.xz cannot be unpacked"):
        read_json(run.inspection_file)
