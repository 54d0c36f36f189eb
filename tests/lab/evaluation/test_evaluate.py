"""From a run folder, a checkpoint or a model to evaluation.json."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from affine_attention import Mechanism
from affine_attention.files import write_json
from affine_attention.lab.evaluation.evaluate import default_length, evaluate, format_evaluation, merge, output_file
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from tests.hf.models import plain_model
from tests.lab.evaluation.models import (
    RECORDS,
    save_checkpoint,
    some_documents,
    tiny_model,
    tiny_tokenizer,
    write_contexts,
    write_lines,
)

NUMBERS = ("token", "word", "byte", "bits_per_byte", "stderr")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run, held-out text and task data."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_lines(folder / "held.jsonl", [{"text": text} for text in some_documents()])
    (folder / "prose.txt").write_text("\n\n".join(text.replace("\n\n", "\n") for text in some_documents(5)))
    recipe = Recipe(
        mechanism=Mechanism.named("affine", bias_length=64), sequence_length=40, data=(str(folder / "held.jsonl"),),
        heldout=0.5,
    )  # fmt: skip
    write_json(folder / "run" / "recipe.json", recipe.to_dict())
    save_checkpoint(folder / "run" / "model")
    write_contexts(folder / "data")
    return folder


def file_of(place: Path) -> dict:
    return json.loads((place / "run" / "evaluation.json").read_text())


def test_a_run_gets_its_file_and_stages_add_to_it(place):
    first = evaluate(place / "run", perplexity={"held": place / "held.jsonl"}, device="cpu")
    assert file_of(place) == first
    assert list(first) == ["schema", "made", "perplexity", "tasks", "instruments"]
    assert first["tasks"] == {}, "perplexity alone was asked for"
    assert first["perplexity"]["held"]["protocol"]["length"] == 40, "the recipe's sequence length"
    assert torch.__version__.startswith(first["made"]["versions"]["torch"])

    both = evaluate(
        place / "run", tasks=["boolq", "piqa"], task_data=place / "data", engine="direct", device="cpu",
        perplexity=[place / "prose.txt"],
    )  # fmt: skip
    assert file_of(place) == both
    assert both["perplexity"]["held"] == first["perplexity"]["held"]
    assert set(both["perplexity"]) == {"held", "prose"}
    piqa = both["tasks"]["piqa"]
    assert piqa["metric"] == "acc_norm"
    assert {"value": piqa["value"], "stderr": piqa["stderr"]} == piqa["metrics"]["acc_norm"]
    assert (piqa["n"], piqa["file"], piqa["form"], piqa["engine"]) == (5, "piqa_test.jsonl", "choices", "direct")
    assert (piqa["dtype"], piqa["autocast"], piqa["limit"], len(piqa["sha256"])) == ("float32", None, None, 64)

    again = evaluate(place / "run", tasks=["piqa"], task_data=place / "data", engine="direct", limit=2, device="cpu")
    assert again["tasks"]["piqa"]["n"] == 2
    assert again["tasks"]["boolq"] == both["tasks"]["boolq"], "re-running one task replaces only that"
    assert again["perplexity"] == both["perplexity"]


def test_results_of_other_weights_are_not_kept(place, tmp_path):
    run = tmp_path / "run"
    write_json(run / "recipe.json", RunFolder(place / "run").recipe().to_dict())
    save_checkpoint(run / "model")
    evaluate(run, perplexity={"held": place / "held.jsonl"}, limit=2, device="cpu")
    save_checkpoint(run / "model", "softmax")
    with pytest.warns(UserWarning, match="results of other weights"):
        found = evaluate(run, perplexity={"prose": place / "prose.txt"}, limit=2, device="cpu")
    assert set(found["perplexity"]) == {"prose"}


def test_what_the_run_held_out(place):
    found = evaluate(place / "run", perplexity={"heldout": None}, device="cpu")["perplexity"]["heldout"]
    assert 0 < found["documents"] < len(some_documents())
    assert "held out of" in found["protocol"]["source"]


def test_a_checkpoint_and_a_model_give_what_the_run_gives(place, tmp_path):
    texts = {"held": place / "held.jsonl"}
    run = evaluate(place / "run", perplexity=texts, device="cpu")["perplexity"]["held"]
    folder = evaluate(place / "run" / "model", perplexity=texts, length=40, device="cpu", output=tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == folder
    model = AutoModelForCausalLM.from_pretrained(place / "run" / "model")
    loaded = evaluate(model, tokenizer=tiny_tokenizer(), perplexity=texts, length=40)
    for key in NUMBERS:
        assert folder["perplexity"]["held"][key] == run[key]
        assert loaded["perplexity"]["held"][key] == run[key]
    assert loaded["made"]["model"] is not None


def test_scores_do_not_depend_on_batch_size_or_order(place, tmp_path):
    """Through both engines, over shuffled files: the numbers are equal; perplexities to six digits."""
    tasks = ["piqa", "arc_easy", "lambada_openai"]
    for seed, folder in ((0, tmp_path / "a"), (1, tmp_path / "b")):
        for task in tasks:
            lines = (place / "data" / f"{task}_test.jsonl").read_text().splitlines(keepends=True)
            folder.mkdir(exist_ok=True)
            (folder / f"{task}.jsonl").write_text("".join(random.Random(seed).sample(lines, len(lines))))
    engines = ["direct"]
    try:
        import lm_eval  # noqa: F401

        engines.append("harness")
    except ImportError:
        warnings.warn("lm-evaluation-harness is not installed: its engine is not tested", stacklevel=1)
    seen = []
    for engine in engines:
        for folder, size in ((tmp_path / "a", 1), (tmp_path / "a", 4), (tmp_path / "b", 4)):
            found = evaluate(
                place / "run" / "model", tasks=tasks, task_data=folder, engine=engine, batch_size=size, device="cpu"
            )
            values = {
                (task, metric): f"{entry['value']:.6g}"
                for task in tasks
                for metric, entry in found["tasks"][task]["metrics"].items()
            }
            seen.append(values)
    assert all(values == seen[0] for values in seen)


def test_the_paper_s_tasks_are_the_default(place, tmp_path):
    default = evaluate(place / "run" / "model", task_data=place / "data", engine="direct", limit=1, device="cpu")
    named = evaluate(
        place / "run" / "model", tasks=["paper", "openbookqa"], task_data=place / "data", engine="direct", limit=1,
        device="cpu",
    )  # fmt: skip
    assert set(default["tasks"]) == set(RECORDS) - {"openbookqa"}
    assert set(named["tasks"]) == set(RECORDS)
    text = format_evaluation("a run", named | {"perplexity": {"c4": dict.fromkeys(NUMBERS, 2.5) | {"documents": 3}}})
    assert len(text.splitlines()) == 1 + 2 + 1 + len(RECORDS)
    assert "openbookqa" in text
    assert " 2.5 " in text
    assert text.splitlines()[-1].split()[3] == "-", "one item has no error"


def test_the_length_is_the_one_of_training(place):
    assert default_length(tiny_model(), RunFolder(place / "run")) == 40
    assert default_length(tiny_model("affine", bias_length=128), None) == 128
    assert default_length(tiny_model("affine", bias_length="visible"), None) == 1024
    assert default_length(plain_model("gpt2"), None) == 512, "all that it can read"


def test_another_dtype_is_loaded_and_recorded(place):
    texts = {"held": place / "held.jsonl"}
    exact = evaluate(place / "run" / "model", perplexity=texts, length=40, device="cpu")
    cast = evaluate(place / "run" / "model", perplexity=texts, length=40, device="cpu", dtype="bfloat16")
    under = evaluate(place / "run" / "model", perplexity=texts, length=40, device="cpu", autocast="bfloat16")
    assert (cast["made"]["dtype"], under["made"]["dtype"], under["made"]["autocast"]) == (
        "bfloat16",
        "float32",
        "bfloat16",
    )
    for near in (cast, under):
        value = near["perplexity"]["held"]["bits_per_byte"]
        assert value == pytest.approx(exact["perplexity"]["held"]["bits_per_byte"], rel=0.02)
        assert value != exact["perplexity"]["held"]["bits_per_byte"]


def test_where_the_file_goes(tmp_path):
    run = RunFolder(tmp_path / "run")
    assert output_file(None, None) is None
    assert output_file(None, run) == tmp_path / "run" / "evaluation.json"
    assert output_file(tmp_path / "x.json", run) == tmp_path / "x.json"
    assert output_file(tmp_path / "folder", None) == tmp_path / "folder" / "evaluation.json"
    new = {"perplexity": {"a": {}}, "tasks": {}}
    assert merge(tmp_path / "none.json", new, "id") == new


def test_errors_explain_what_to_do(place, tmp_path):
    model = place / "run" / "model"
    cases = [
        (FileNotFoundError, "is not a folder", {"path": tmp_path / "none"}),
        (FileNotFoundError, "no finished model", {"path": tmp_path}),
        (ValueError, 'engine must be "harness" or "direct"', {"engine": "other"}),
        (ValueError, "limit must be None or an integer", {"limit": 0}),
        (TypeError, "list of names", {"tasks": "piqa"}),
        (ValueError, "did you mean 'piqa'?", {"tasks": ["piqaa"], "task_data": place / "data", "engine": "direct"}),
        (ValueError, "needs task_data", {"engine": "direct"}),
        (ValueError, "which only a run has", {"perplexity": {"held": None}}),
        (ValueError, "autocast must be one of float32", {"autocast": "half", "perplexity": [place / "prose.txt"]}),
        (ValueError, "two files of perplexity", {"perplexity": [place / "prose.txt", tmp_path / "prose.txt"]}),
    ]
    for kind, words, settings in cases:
        with pytest.raises(kind) as error:
            evaluate(settings.pop("path", model), **settings)
        assert words in str(error.value)
    tiny_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError) as error:
        evaluate(tmp_path / "bare", perplexity=[place / "prose.txt"], device="cpu")
    assert "bare has none" in str(error.value)
    for words, settings in (("tokenizer must be given", {}), ("dtype must be left out", {"dtype": "bfloat16"})):
        with pytest.raises(ValueError) as error:
            evaluate(
                tiny_model(),
                tokenizer=tiny_tokenizer() if settings else None,
                perplexity=[place / "prose.txt"],
                **settings,
            )
        assert words in str(error.value)


def test_without_the_harness_the_extra_is_named(place, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError) as error:
        evaluate(place / "run" / "model", tasks=["piqa"], task_data=place / "data", device="cpu")
    assert 'pip install "affine-attention[eval]"' in str(error.value)
    assert 'engine="direct"' in str(error.value)
    found = evaluate(place / "run" / "model", tasks=["piqa"], task_data=place / "data", engine="direct", device="cpu")
    assert found["tasks"]["piqa"]["n"] == 5
