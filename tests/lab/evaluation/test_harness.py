"""Through lm-evaluation-harness: records, ready-made contexts and the harness's own command give equal scores."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from affine_attention.lab.evaluation.evaluate import evaluate
from affine_attention.lab.evaluation.harness import check_names, default_metric, is_offline, read_result, run_harness
from affine_attention.lab.evaluation.tasks import find_tasks, write_tasks
from tests.lab.evaluation.models import (
    ROOT,
    save_checkpoint,
    tiny_model,
    tiny_tokenizer,
    write_contexts,
    write_records,
)

pytest.importorskip("lm_eval", reason="needs the extra eval")


def test_records_and_ready_made_contexts_have_equal_scores(tmp_path):
    """The harness's own definition on the original records, and our contexts: the same numbers, all digits."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    records = find_tasks(write_records(tmp_path / "records"))
    contexts = find_tasks(write_contexts(tmp_path / "contexts"))
    theirs = run_harness(model, tokenizer, list(records.values()), batch_size=4)
    ours = run_harness(model, tokenizer, [contexts[task] for task in records], batch_size=4)
    for task in records:
        assert ours[task]["metrics"] == theirs[task]["metrics"], task
        assert ours[task]["n"] == theirs[task]["n"]


def test_scores_do_not_depend_on_the_batch_size(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    files = list(find_tasks(write_contexts(tmp_path)).values())
    one, four = (run_harness(model, tokenizer, files, batch_size=size) for size in (1, 4))
    for task, found in one.items():
        for metric, entry in found["metrics"].items():
            assert entry["value"] == pytest.approx(four[task]["metrics"][metric]["value"], rel=1e-5), (task, metric)
            if metric != "perplexity":
                assert entry == four[task]["metrics"][metric]


def test_its_own_command_line_gives_the_same_scores(tmp_path):
    """`lm_eval` on the same checkpoint and definitions, in a process that does not import this package."""
    save_checkpoint(tmp_path / "model")
    tasks = ["piqa", "winogrande", "lambada_openai"]
    names = write_tasks(write_contexts(tmp_path / "data"), tmp_path / "definitions", tasks)
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", ",".join(names), "--device", "cpu",
        "--model_args", f"pretrained={tmp_path / 'model'},trust_remote_code=True,dtype=float32", "--batch_size", "4",
        "--include_path", str(tmp_path / "definitions"), "--output_path", str(tmp_path / "theirs.json"),
    ]  # fmt: skip
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "DISABLE_MULTIPROC": "1",
    }  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = tmp_path.glob("theirs*.json")
    theirs = json.loads(written.read_text())["results"]
    ours = evaluate(tmp_path / "model", tasks=tasks, task_data=tmp_path / "data", batch_size=4, device="cpu")["tasks"]
    for task, name in zip(tasks, names, strict=True):
        for metric, entry in ours[task]["metrics"].items():
            assert entry["value"] == theirs[name][f"{metric},none"], (task, metric)
            if metric != "perplexity":  # whose error is drawn at random
                assert entry["stderr"] == theirs[name][f"{metric}_stderr,none"]


def test_autocast_reaches_the_forward(tmp_path):
    model = tiny_model()
    file = find_tasks(write_contexts(tmp_path))["lambada_openai"]
    exact, near = (
        run_harness(model, tiny_tokenizer(), [file], autocast=dtype)["lambada_openai"]["metrics"]["perplexity"]["value"]
        for dtype in (None, torch.bfloat16)
    )
    assert near == pytest.approx(exact, rel=0.5)
    assert near != exact


def test_a_length_that_padding_changes_is_rejected(tmp_path):
    model = tiny_model("affine", bias_length="keys")
    with pytest.raises(ValueError) as error:
        run_harness(model, tiny_tokenizer(), list(find_tasks(write_contexts(tmp_path)).values()))
    assert 'engine="direct"' in str(error.value)


def test_the_offline_error_explains_what_to_do(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(OSError) as error:
        run_harness(tiny_model(), tiny_tokenizer(), ["piqa"], limit=2)
    assert "task_data=DIR" in str(error.value)
    assert "piqa" in str(error.value)


def test_connection_errors_are_recognised():
    wrapped = ValueError("something else")
    wrapped.__cause__ = ConnectionError("nobody there")
    assert is_offline(wrapped)
    assert not is_offline(ValueError("a broken definition"))


def test_names_that_the_paper_uses_need_no_index():
    check_names(["piqa", "lambada_openai"])


@pytest.mark.slow
def test_an_unknown_task_name():
    with pytest.raises(ValueError) as error:
        check_names(["hellaswagg"])
    assert "did you mean 'hellaswag'?" in str(error.value)
    check_names(["sciq"])


def test_results_are_read_by_metric():
    found = {
        "results": {
            "x": {"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,none": 0.3, "f1_stderr,none": "N/A"}
        },
        "n-samples": {"x": {"effective": 7}},
        "versions": {"x": 2},
    }
    assert read_result(found, "x") == {
        "n": 7, "metrics": {"acc": {"value": 0.5, "stderr": 0.1}, "f1": {"value": 0.3, "stderr": None}}, "version": 2,
    }  # fmt: skip
    assert default_metric({"f1": 0, "acc": 0}) == "acc"
    assert default_metric({"own": 0}) == "own"
