"""Perplexity equals that of lm-evaluation-harness for any batch size and order."""

from __future__ import annotations

import math
import random

import pytest
import torch

from affine_attention.lab.evaluation.perplexity import perplexity, ratio_stderr, rolling_windows, split_articles
from tests.lab.evaluation.models import some_documents, tiny_model, tiny_tokenizer, write_lines


@pytest.mark.parametrize("length", [1, 2, 7, 16, 50])
@pytest.mark.parametrize("overlap", [0, 1, 5])
def test_windows_are_those_of_the_harness(length, overlap):
    utils = pytest.importorskip("lm_eval.utils", reason="needs the extra eval")
    if overlap >= length:
        return
    for size in (0, 1, 2, 6, 7, 8, 15, 33):
        tokens = list(range(1, size + 1))
        pairs = utils.get_rolling_token_windows(tokens, 0, length, overlap + 1)
        expected = [(*utils.make_disjoint_window(pair),) for pair in pairs]
        windows = rolling_windows(tokens, 0, length, length - overlap)
        assert windows == [(before + after, len(after)) for before, after in expected]
        assert sum(window.scored for window in windows) == size


def test_it_is_that_of_the_harness(tmp_path):
    """Same documents, same window, through a task of the harness; equal up to the rounding of its float32 sums."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tokenizer, documents = tiny_model(), tiny_tokenizer(), some_documents()
    file = write_lines(tmp_path / "documents.jsonl", [{"text": text} for text in documents])
    (tmp_path / "rolling.yaml").write_text(
        "task: rolling\ndataset_path: json\noutput_type: loglikelihood_rolling\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {file}}}}}\ndoc_to_text: ''\ndoc_to_target: '{{{{text}}}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=48)
    theirs = lm_eval.simple_evaluate(lm, tasks=["rolling"], task_manager=manager)["results"]["rolling"]
    ours = perplexity(model, tokenizer, documents, length=48)
    assert ours["word"] == pytest.approx(theirs["word_perplexity,none"], rel=1e-5)
    assert ours["byte"] == pytest.approx(theirs["byte_perplexity,none"], rel=2e-6)
    assert ours["bits_per_byte"] == pytest.approx(theirs["bits_per_byte,none"], rel=5e-7)
    assert ours["protocol"]["windows"] > len(documents), "some documents are longer than a window"


def test_numbers_fit_each_other():
    documents = some_documents()
    found = perplexity(tiny_model(), tiny_tokenizer(), documents, length=32)
    nll = math.log(found["token"]) * found["tokens"]
    assert found["documents"] == len(documents)
    assert found["bytes"] == sum(len(text.encode()) for text in documents)
    assert found["tokens"] == sum(len(tiny_tokenizer().encode(text)) for text in documents)
    assert math.log(found["word"]) * found["words"] == pytest.approx(nll)
    assert math.log(found["byte"]) * found["bytes"] == pytest.approx(nll)
    assert found["bits_per_byte"] == pytest.approx(math.log2(found["byte"]))
    assert found["stderr"] > 0
    assert found["protocol"] | {"documents_sha256": ""} == {
        "length": 32, "stride": 32, "first_token_after": "<|endoftext|>", "windows": found["protocol"]["windows"],
        "autocast": None, "dtype": "float32", "documents_sha256": "",
    }  # fmt: skip


@torch.no_grad()
def test_a_short_document_is_one_forward():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = [tokenizer.eos_token_id, *tokenizer.encode("Once upon a time there was a cat")]
    logprobs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    nll = -logprobs.gather(1, torch.tensor(ids[1:])[:, None]).mean()
    found = perplexity(model, tokenizer, ["Once upon a time there was a cat"], length=64)
    assert found["token"] == pytest.approx(float(nll.exp()), rel=1e-5)
    assert found["stderr"] is None, "one document has no error over documents"


def test_order_changes_nothing_and_batch_size_only_rounding():
    model, tokenizer, documents = tiny_model("affine_gated"), tiny_tokenizer(), some_documents(12)
    numbers = ("token", "word", "byte", "bits_per_byte", "stderr")
    first = perplexity(model, tokenizer, documents, length=32)
    for seed in range(3):
        shuffled = random.Random(seed).sample(documents, len(documents))
        again = perplexity(model, tokenizer, shuffled, length=32)
        assert {key: again[key] for key in numbers} == {key: first[key] for key in numbers}, "bitwise equal"
        for size in (1, 3, 8):
            other = perplexity(model, tokenizer, shuffled, length=32, batch_size=size)
            assert [f"{other[key]:.6g}" for key in numbers] == [f"{first[key]:.6g}" for key in numbers]


def test_more_context_is_another_number():
    model, tokenizer, documents = tiny_model(), tiny_tokenizer(), some_documents()
    plain = perplexity(model, tokenizer, documents, length=32)
    strided = perplexity(model, tokenizer, documents, length=32, stride=8)
    assert strided["tokens"] == plain["tokens"]
    assert strided["protocol"]["windows"] > plain["protocol"]["windows"]
    assert strided["token"] != plain["token"]


def test_tokens_are_kept_for_the_next_model():
    cache: dict = {}
    tokenizer, documents = tiny_tokenizer(), some_documents()
    first = perplexity(tiny_model("softmax"), tokenizer, documents, length=32, cache=cache)
    (key,) = cache
    cache[key] = [ids[:3] for ids in cache[key]]
    again = perplexity(tiny_model("softmax"), tokenizer, documents, length=32, cache=cache)
    assert again["tokens"] < first["tokens"], "the second call read the cache"


def test_the_error_of_equal_documents_is_the_classical_one():
    values = [3.0, 5.0, 4.0, 8.0]
    mean = sum(values) / 4
    classical = math.sqrt(sum((value - mean) ** 2 for value in values) / 3 / 4)
    assert ratio_stderr([10 * value for value in values], [10] * 4) == pytest.approx(classical)


def test_the_error_is_that_of_resampled_documents():
    generator = random.Random(0)
    counts = [generator.randrange(5, 200) for _ in range(300)]
    nlls = [count * generator.gauss(3, 0.5) for count in counts]
    means = []
    for _ in range(2000):
        chosen = generator.choices(range(300), k=300)
        means.append(sum(nlls[i] for i in chosen) / sum(counts[i] for i in chosen))
    middle = sum(means) / len(means)
    spread = math.sqrt(sum((mean - middle) ** 2 for mean in means) / (len(means) - 1))
    assert ratio_stderr(nlls, counts) == pytest.approx(spread, rel=0.1)


def test_articles_of_wikitext():
    text = "= One =\n words of it \n = = part = = \n more\n = Two = \n its words"
    assert split_articles([text]) == ["= One =\n words of it \n = = part = = \n more", "= Two = \n its words"]
    for other in (["plain text\n = One = \n"], ["= A =\nb", "= C =\nd"], []):
        assert split_articles(other) == other


def test_errors_name_the_rule():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    for length, stride in ((0, None), (8, 9), (8, 0)):
        with pytest.raises(ValueError) as error:
            perplexity(model, tokenizer, ["text"], length=length, stride=stride)
        assert "1 <= stride <= length" in str(error.value)
    with pytest.raises(ValueError) as error:
        perplexity(model, tokenizer, ["", ""], length=8)
    assert "2 empty documents" in str(error.value)
