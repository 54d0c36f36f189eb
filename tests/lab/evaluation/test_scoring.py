"""Log-likelihoods equal those of a plain forward for any batch size, order and padding."""

from __future__ import annotations

import random

import pytest
import torch

from affine_attention.lab.evaluation import scoring
from affine_attention.lab.evaluation.scoring import Request, encode, encode_pairs, evaluating, plan, score
from tests.hf.models import plain_model
from tests.lab.evaluation.models import END, some_documents, tiny_model, tiny_tokenizer


def some_requests(model, count: int = 13) -> list[Request]:
    generator = random.Random(0)
    size = model.config.vocab_size
    requests = []
    for _ in range(count):
        tokens = [generator.randrange(size) for _ in range(generator.randrange(2, 70))]
        requests.append(Request(tokens, generator.randrange(1, len(tokens))))
    requests.append(Request([*requests[0].tokens[:-1], 3], 1))  # shares the input of the first
    return requests


@torch.no_grad()
def plain_scores(model, requests):
    """One forward for each request, without padding, in fp64 after the logits."""
    found = []
    for tokens, scored in requests:
        logprobs = model(torch.tensor([tokens[:-1]])).logits[0, -scored:].double().log_softmax(-1)
        targets = torch.tensor(tokens[-scored:])
        found.append((float(logprobs.gather(1, targets[:, None]).sum()), bool((logprobs.argmax(-1) == targets).all())))
    return found


@pytest.mark.parametrize("mechanism", ["softmax", "affine", "affine_gated", "sink"])
def test_scores_are_those_of_one_forward_each(mechanism):
    model = tiny_model(mechanism)
    requests = some_requests(model)
    for found, (logprob, greedy) in zip(score(model, requests), plain_scores(model, requests), strict=True):
        assert found.logprob == pytest.approx(logprob, rel=1e-5)
        assert found.greedy is greedy


@pytest.mark.parametrize("bias_length", ["visible", "keys"])
def test_other_bias_lengths_too(bias_length):
    model = tiny_model("affine", bias_length=bias_length)
    requests = some_requests(model)
    requests += [Request(list(reversed(r.tokens)), r.scored) for r in requests[:4]]  # of equal length: batched
    for size in (None, 2):
        for found, (logprob, _) in zip(
            score(model, requests, batch_size=size), plain_scores(model, requests), strict=True
        ):
            assert found.logprob == pytest.approx(logprob, rel=1e-5)


@pytest.mark.parametrize("family", ["granite", "gpt2", "gemma"])
def test_whatever_a_family_does_to_its_logits_is_done(family):
    """Granite divides them; GPT-2 has a limited number of positions, which padding must not pass."""
    model = plain_model(family)
    requests = some_requests(model)
    limit = scoring.max_length(model)
    requests.append(Request([n % 60 for n in range(limit + 1)], 5))
    for found, (logprob, greedy) in zip(score(model, requests), plain_scores(model, requests), strict=True):
        assert found.logprob == pytest.approx(logprob, rel=1e-5)
        assert found.greedy is greedy


def test_order_changes_nothing_and_batch_size_only_rounding():
    model = tiny_model()
    requests = some_requests(model, 30)
    shuffled = random.Random(1).sample(range(len(requests)), len(requests))
    for size in (None, 1, 3, 8):
        found = score(model, requests, batch_size=size)
        again = score(model, [requests[index] for index in shuffled], batch_size=size)
        assert again == [found[index] for index in shuffled], "bitwise equal"
        for one, other in zip(found, score(model, requests, batch_size=1), strict=True):
            assert one.logprob == pytest.approx(other.logprob, rel=2e-6)
            assert one.greedy is other.greedy


def test_a_batch_keeps_its_limits_and_scores_each_request_once(monkeypatch):
    model = tiny_model()
    requests = some_requests(model, 40)
    monkeypatch.setitem(scoring.TOKENS_PER_FORWARD, "cpu", 256)
    monkeypatch.setitem(scoring.LOGITS_PER_FORWARD, "cpu", 100 * model.config.vocab_size)
    batches = list(plan(requests, model, "cpu", 5))
    served = sorted(index for batch in batches for _, index in batch.members)
    assert served == list(range(len(requests)))
    assert sum(len(batch.rows) for batch in batches) == len(requests) - 1, "two requests share an input"
    for batch in batches:
        assert len(batch.rows) <= 5
        assert batch.width % scoring.BUCKET == 0
        assert max(map(len, batch.rows)) <= batch.width
        assert len(batch.rows) == 1 or len(batch.rows) * batch.width <= 256
        assert len(batch.rows) == 1 or sum(requests[index].scored for _, index in batch.members) <= 100
    assert [b.width for b in batches] == sorted((b.width for b in batches), reverse=True)


def test_only_scored_positions_reach_the_vocabulary():
    model = tiny_model()
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    score(model, [Request(list(range(1, 40)), 2), Request(list(range(5, 30)), 3)])
    hook.remove()
    assert seen == [5]


def test_logits_in_chunks_are_the_same(monkeypatch):
    model = tiny_model()
    requests = some_requests(model)
    whole = score(model, requests)
    monkeypatch.setitem(scoring.LOGITS_PER_CHUNK, "cpu", 7 * model.config.vocab_size)
    assert score(model, requests) == whole


def test_the_model_is_left_as_it_was():
    model = tiny_model().train()
    model.model.layers[0].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    score(model, some_requests(model, 3))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.lm_head._forward_pre_hooks
    assert score(model, []) == []


def test_autocast_stays_near():
    model = tiny_model()
    requests = some_requests(model)
    for exact, near in zip(score(model, requests), score(model, requests, autocast=torch.bfloat16), strict=True):
        assert near.logprob == pytest.approx(exact.logprob, rel=0.05)
        assert near.logprob != exact.logprob


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mechanism", ["softmax", "affine_gated"])
def test_scores_on_a_gpu(mechanism):
    """Those of the CPU; there too order changes nothing, under autocast as well."""
    model = tiny_model(mechanism)
    requests = some_requests(model, 60)
    expected = score(model, requests)
    model.cuda()
    shuffled = random.Random(1).sample(range(len(requests)), len(requests))
    for autocast, tolerance in ((None, 1e-4), (torch.bfloat16, 0.05)):
        found = score(model, requests, autocast=autocast)
        for one, other in zip(found, expected, strict=True):
            assert one.logprob == pytest.approx(other.logprob, rel=tolerance)
        again = score(model, [requests[index] for index in shuffled], autocast=autocast)
        assert again == [found[index] for index in shuffled], "bitwise equal"
        for size in (1, 7):
            for one, other in zip(score(model, requests, batch_size=size, autocast=autocast), found, strict=True):
                assert one.logprob == pytest.approx(other.logprob, rel=tolerance)


def test_texts_are_encoded_one_by_one_or_together():
    tokenizer = tiny_tokenizer()
    texts = [*some_documents(5), "", END + "begins by itself"]
    assert encode(tokenizer, texts) == [tokenizer.encode(text) for text in texts]
    assert encode(tokenizer, []) == []


def test_pairs_are_split_like_the_harness():
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="needs the extra eval")
    model, tokenizer = tiny_model(), tiny_tokenizer()
    lm = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    pairs = [
        ("Question: who?\nAnswer:", " the king"),
        ("ends with spaces   ", "and goes on"),
        ("One wor", "d in two parts"),
        ("café —", " naïve"),
    ]
    expected = [lm._encode_pair(*pair) for pair in pairs]
    assert encode_pairs(tokenizer, pairs, 8192) == [(before + after, len(after)) for before, after in expected]
    start = tokenizer.eos_token_id
    alone = tokenizer.encode(" the king")
    assert encode_pairs(tokenizer, [("", " the king")], 8192) == [([start, *alone], len(alone))]
    (long,) = encode_pairs(tokenizer, [(some_documents(5)[4], " the end")], 10)
    assert (len(long.tokens), long.scored) == (11, len(tokenizer.encode(" the end")))


def test_errors_name_what_is_wrong():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    with pytest.raises(ValueError) as error:
        score(model, [Request([1, 2, 3], 3)])
    assert "1 to len(tokens) - 1 = 2" in str(error.value)
    with pytest.raises(ValueError) as error:
        encode_pairs(tokenizer, [("Some context", "")], 100)
    assert "continuation must have 1 to 100 tokens" in str(error.value)
    bare = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError) as error:
        encode(bare, ["text"])
    assert "bos_token or an eos_token" in str(error.value)
