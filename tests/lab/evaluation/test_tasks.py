"""A folder of task data becomes tasks: by name, split and form; the definitions are the harness's where they can be."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

from affine_attention.lab.evaluation.tasks import (
    DEFAULT_TASKS,
    TASKS,
    choose_tasks,
    find_tasks,
    read_items,
    split_name,
    write_tasks,
)
from tests.lab.evaluation.models import RECORDS, SHARED, write_contexts, write_lines, write_records

ITEM = {"ctx": "a", "choices": ["b", "c"], "gold": 0}


def test_every_task_is_one_of_the_harness_with_that_metric_and_split():
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")
    from lm_eval.tasks._yaml_loader import load_yaml

    for name, task in TASKS.items():
        own = load_yaml(Path(lm_eval.__file__).parent / "tasks" / task.definition, resolve_func=False)
        assert own["task"] == name
        assert task.metric in [entry["metric"] for entry in own["metric_list"]]
        assert task.split == (own.get("test_split") or own["validation_split"])
        has_norm = "acc_norm" in [entry["metric"] for entry in own["metric_list"]]
        assert (task.metric == "acc_norm") is has_norm
    assert set(DEFAULT_TASKS) < set(TASKS)


@pytest.mark.parametrize(
    ("stem", "expected"),
    [
        ("arc_easy_test", ("arc_easy", "test")),
        ("hellaswag_val", ("hellaswag", "validation")),
        ("piqa", ("piqa", "")),
        ("piqa-validation", ("piqa", "validation")),
        ("boolq.dev", ("boolq", "validation")),
        ("my_contest", ("my_contest", "")),
        ("piqa_train", ("piqa", "train")),
    ],
)
def test_names_of_files(stem, expected):
    assert split_name(stem) == expected


def test_the_harness_split_is_taken_and_training_data_never(tmp_path):
    for name in ("arc_easy_val", "arc_easy_test", "arc_easy_train", "piqa_train", "winogrande_test", "mine", "boolq"):
        write_lines(tmp_path / f"{name}.jsonl", [ITEM])
    (tmp_path / "readme.txt").write_text("no task")
    write_lines(tmp_path / "notes.jsonl", [{"note": "no task either"}])
    found = find_tasks(tmp_path)
    assert {task: file.path.name for task, file in found.items()} == {
        "arc_easy": "arc_easy_test.jsonl", "winogrande": "winogrande_test.jsonl", "mine": "mine.jsonl",
        "boolq": "boolq.jsonl",
    }  # fmt: skip
    assert found["arc_easy"].split == "test"
    assert found["boolq"].metrics == ("acc",), "as the harness has it"
    assert found["mine"].metrics == ("acc", "acc_norm")
    assert found["mine"].metric == "acc_norm"
    assert found["mine"].sha256() == hashlib.sha256((tmp_path / "mine.jsonl").read_bytes()).hexdigest()


def test_forms_are_known_by_their_fields(tmp_path):
    contexts = find_tasks(write_contexts(tmp_path / "contexts"))
    assert set(contexts) == set(RECORDS)
    forms = {task: file.form for task, file in contexts.items()}
    assert forms.pop("winogrande") == "contexts"
    assert forms.pop("lambada_openai") == "target"
    assert set(forms.values()) == {"choices"}
    records = find_tasks(write_records(tmp_path / "records"))
    assert {file.form for file in records.values()} == {"records"}


@pytest.mark.parametrize("ending", ["parquet", "arrow", "file.arrow"])
def test_records_may_be_parquet_or_arrow(tmp_path, ending):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra eval")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(RECORDS["piqa"])
    if ending == "parquet":
        parquet.write_table(table, tmp_path / "piqa.parquet")
    else:
        new = pyarrow.ipc.new_file if ending.startswith("file") else pyarrow.ipc.new_stream
        with new(str(tmp_path / "piqa.arrow"), table.schema) as writer:
            writer.write_table(table)
    file = find_tasks(tmp_path)["piqa"]
    assert file.form == "records"


def test_definitions_of_ready_made_contexts(tmp_path):
    names = write_tasks(write_contexts(tmp_path / "data"), tmp_path / "out")
    assert sorted(names) == sorted(f"{task}_local" for task in RECORDS)
    piqa = yaml.safe_load((tmp_path / "out" / "piqa_local.yaml").read_text())
    assert piqa["dataset_kwargs"] == {"data_files": {"test": str(tmp_path / "data" / "piqa_test.jsonl")}}
    assert (piqa["doc_to_text"], piqa["doc_to_choice"], piqa["doc_to_target"]) == ("ctx", "choices", "gold")
    assert [entry["metric"] for entry in piqa["metric_list"]] == ["acc", "acc_norm"]
    last = yaml.safe_load((tmp_path / "out" / "lambada_openai_local.yaml").read_text())
    assert last["output_type"] == "loglikelihood"
    assert write_tasks(tmp_path / "data", tmp_path / "one", ["boolq"]) == ["boolq_local"]


def test_definitions_of_records_are_the_harness_s_own(tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")
    write_tasks(write_records(tmp_path / "data"), tmp_path / "out")
    arc = yaml.safe_load((tmp_path / "out" / "arc_easy_local.yaml").read_text())
    assert Path(arc["include"]) == Path(lm_eval.__file__).parent / "tasks" / "arc" / "arc_easy.yaml"
    assert (arc["test_split"], arc["validation_split"], arc["training_split"]) == ("test", None, None)
    assert "doc_to_text" not in arc


def test_the_sets_at_hand(tmp_path):
    if not (SHARED / "evals").is_dir():
        pytest.skip("the evaluation sets are not on this machine")
    found = find_tasks(SHARED / "evals")
    assert set(found) == set(TASKS)
    assert found["arc_easy"].path.name == "arc_easy_test.jsonl"
    assert [file.task for file in choose_tasks(None, found)] == list(DEFAULT_TASKS)
    sizes = {"piqa": 1838, "arc_easy": 2376, "winogrande": 1267, "lambada_openai": 5153, "openbookqa": 500}
    for task, size in sizes.items():
        assert sum(1 for _ in read_items(found[task])) == size


def test_errors_say_what_is_there(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        find_tasks(tmp_path / "nowhere")
    assert "nowhere" in str(error.value)
    with pytest.raises(ValueError) as error:
        find_tasks(tmp_path)
    assert "holds no task" in str(error.value)
    write_lines(tmp_path / "piqa.jsonl", [{"goal": "a", "sol1": "b"}])
    with pytest.raises(ValueError) as error:
        find_tasks(tmp_path)
    assert "lacks sol2, label" in str(error.value)
    write_lines(tmp_path / "piqa.jsonl", [ITEM])
    found = find_tasks(tmp_path)
    for name, hint in (("piqaa", "did you mean 'piqa'?"), ("boolq", "it has piqa")):
        with pytest.raises(ValueError) as error:
            choose_tasks([name], found)
        assert hint in str(error.value)
    (tmp_path / "piqa.jsonl").rename(tmp_path / "mine.jsonl")
    with pytest.raises(ValueError) as error:
        choose_tasks(None, find_tasks(tmp_path))
    assert "holds none of winogrande" in str(error.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"ctx": "a", "choices": ["b"], "gold": 1}', "gold must be 0 to 0, got 1"),
        ('{"ctx": "a", "choices": ["b"], "gold": "0"}', "gold must be 0 to 0, got '0'"),
        ('{"ctx": "a", "choices": ["b"]}', "lacks gold"),
        ("{broken", "not a json object"),
    ],
)
def test_an_item_that_is_wrong_is_named_by_its_line(tmp_path, line, words):
    path = write_lines(tmp_path / "piqa.jsonl", [ITEM])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(ValueError) as error:
        list(read_items(find_tasks(tmp_path)["piqa"]))
    assert "line 3" in str(error.value)
    assert words in str(error.value)


def test_the_first_line_must_be_json(tmp_path):
    (tmp_path / "piqa.jsonl").write_text("goal,sol1\n")
    with pytest.raises(ValueError) as error:
        find_tasks(tmp_path)
    assert "one json object per line" in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        "[1]", "3", "null", '"text"', '{"ctx": 1, "choices": ["b"], "gold": 0}', "[" * 100_000,
        '{"ctx": "a", "choices": [], "gold": 0}', '{"ctx": "a", "choices": "b", "gold": 0}',
        '{"ctx": "a", "choices": [""], "gold": 0}', '{"ctx": "a", "choices": ["b"], "gold": 9}',
        '{"ctx": "a", "choices": ["b"], "gold": true}',
    ],
)  # fmt: skip
def test_both_engines_refuse_the_same_lines(line, tmp_path):
    from affine_attention.lab.evaluation.harness import run_harness

    path = write_lines(tmp_path / "piqa.jsonl", [ITEM])
    path.write_text(path.read_text() + line + "\n")
    file = find_tasks(tmp_path)["piqa"]
    with pytest.raises(ValueError) as direct:
        list(read_items(file))
    assert "line 2" in str(direct.value)
    pytest.importorskip("lm_eval")
    with pytest.raises(ValueError) as harness:
        run_harness(None, None, [file])
    assert str(harness.value) == str(direct.value)
