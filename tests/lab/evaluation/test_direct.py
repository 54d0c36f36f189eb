"""The direct engine gives the scores of lm-evaluation-harness for any batch size and order."""

from __future__ import annotations

import random

import pytest

from affine_attention.lab.evaluation.direct import aggregate, run_direct
from affine_attention.lab.evaluation.harness import run_harness
from affine_attention.lab.evaluation.tasks import DEFAULT_TASKS, find_tasks
from tests.lab.evaluation.models import (
    RECORDS,
    SHARED,
    ready_made,
    tiny_model,
    tiny_tokenizer,
    write_contexts,
    write_lines,
    write_records,
)


def assert_same_scores(ours, theirs):
    """Accuracies and their errors digit for digit; perplexities up to the rounding of float32 sums."""
    assert set(ours) == set(theirs)
    for task, found in ours.items():
        assert found["n"] == theirs[task]["n"]
        assert set(found["metrics"]) == set(theirs[task]["metrics"])
        for metric, entry in found["metrics"].items():
            other = theirs[task]["metrics"][metric]
            if metric == "perplexity":
                assert entry["value"] == pytest.approx(other["value"], rel=1e-5)
            else:
                assert entry["value"] == pytest.approx(other["value"], rel=1e-14)
                assert entry["stderr"] == pytest.approx(other["stderr"], rel=1e-12)


def test_it_gives_the_scores_of_the_harness(tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    files = list(find_tasks(write_contexts(tmp_path)).values())
    for mechanism in ("affine", "softmax"):
        model = tiny_model(mechanism)
        assert_same_scores(
            run_direct(model, tiny_tokenizer(), files), run_harness(model, tiny_tokenizer(), files, batch_size=3)
        )


def test_it_gives_the_scores_of_the_harness_on_real_sets():
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    if not (SHARED / "evals").is_dir():
        pytest.skip("the evaluation sets are not on this machine")
    found = find_tasks(SHARED / "evals")
    files = [found[task] for task in (*DEFAULT_TASKS, "openbookqa")]
    model = tiny_model()
    ours = run_direct(model, tiny_tokenizer(), files, limit=12)
    assert_same_scores(ours, run_harness(model, tiny_tokenizer(), files, limit=12))
    assert {entry["n"] for entry in ours.values()} == {12}


def test_scores_do_not_depend_on_batch_size_or_order(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    items = [ready_made("piqa", record) for record in RECORDS["piqa"]] * 3
    for index, item in enumerate(items):
        items[index] = item | {"ctx": f"{item['ctx'][:-1]} {index}:"}
    results = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        write_lines(folder / "piqa.jsonl", random.Random(seed).sample(items, len(items)) if seed else items)
        for size in (None, 1, 4):
            results.append(run_direct(model, tokenizer, [find_tasks(folder)["piqa"]], batch_size=size))
    assert all(result == results[0] for result in results)
    assert 0 < results[0]["piqa"]["metrics"]["acc"]["value"] < 1, "a score that could differ"


def test_ties_are_broken_like_the_harness(tmp_path):
    """The first of equal choices wins, in the harness too; only equal log-likelihoods make that so."""
    items = [{"ctx": f"Number {n}", "choices": ["the same words", "the same words"], "gold": n % 2} for n in range(8)]
    write_lines(tmp_path / "twins.jsonl", items)
    for size in (None, 1, 3):
        found = run_direct(tiny_model(), tiny_tokenizer(), [find_tasks(tmp_path)["twins"]], batch_size=size)
        assert found["twins"]["metrics"]["acc"]["value"] == 0.5


def test_tokens_are_kept_for_the_next_model_but_not_for_a_changed_file(tmp_path):
    cache: dict = {}
    tokenizer = tiny_tokenizer()
    write_contexts(tmp_path)
    run_direct(tiny_model("softmax"), tokenizer, [find_tasks(tmp_path)["piqa"]], cache=cache)
    run_direct(tiny_model("affine"), tokenizer, [find_tasks(tmp_path)["piqa"]], cache=cache)
    assert len(cache) == 1
    write_lines(tmp_path / "piqa_test.jsonl", [ready_made("piqa", RECORDS["piqa"][0])])
    found = run_direct(tiny_model("affine"), tokenizer, [find_tasks(tmp_path)["piqa"]], cache=cache)
    assert found["piqa"]["n"] == 1
    assert found["piqa"]["metrics"]["acc"]["stderr"] is None


def test_aggregates():
    assert aggregate("acc", [1.0, 0.0, 1.0, 1.0]) == {"value": 0.75, "stderr": 0.25}
    assert aggregate("perplexity", [-2000.0])["value"] == float("inf")


def test_records_are_left_to_the_harness(tmp_path):
    with pytest.raises(ValueError) as error:
        run_direct(tiny_model(), tiny_tokenizer(), [find_tasks(write_records(tmp_path))["boolq"]])
    assert 'engine="harness"' in str(error.value)
    (tmp_path / "empty.jsonl").write_text('{"ctx": "a", "choices": ["b"], "gold": 0}\n')
    file = find_tasks(tmp_path)["empty"]
    file.path.write_text("\n")
    with pytest.raises(ValueError) as error:
        run_direct(tiny_model(), tiny_tokenizer(), [file])
    assert "at least one item" in str(error.value)
