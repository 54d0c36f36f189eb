"""Computes log-likelihoods of token sequences, for perplexity and for the direct engine of the tasks.

A request is a sequence of tokens of which the last few are scored. Requests are sorted by length and content, so that
their order does not even change the rounding; requests with the same input share a forward. Rows are padded on the
right without a mask: in a causal model no later token changes an earlier position. This holds for every mechanism but
bias_length="keys", whose rows are batched by equal length instead. The batch size only changes how kernels round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

BUCKET = 16  # rows are padded to a multiple of this, so that kernels are compiled for few shapes
TOKENS_PER_FORWARD = {"cpu": 2**12, "cuda": 2**15}
LOGITS_PER_FORWARD = {"cpu": 2**27, "cuda": 2**30}  # scored positions x vocabulary, in the dtype of the model
LOGITS_PER_CHUNK = {"cpu": 2**24, "cuda": 2**28}  # how many of these are converted to float32 at a time


class Request(NamedTuple):
    tokens: Sequence[int]
    scored: int  # how many of the last tokens are scored


class Score(NamedTuple):
    logprob: float  # natural logarithm, summed over the scored tokens in fp64
    greedy: bool  # True if every scored token was the most likely one


class Batch(NamedTuple):
    rows: list[tuple[int, ...]]  # distinct inputs
    width: int
    members: list[tuple[int, int]]  # (row, index of a request)


@torch.no_grad()
def score(
    model: Any,
    requests: Sequence[Request],
    *,
    batch_size: int | None = None,
    autocast: torch.dtype | None = None,
) -> list[Score]:
    """The log-likelihood of the scored tokens of each request.

    Args:
        model: a transformers causal LM, on its device.
        requests: see `Request`; at least one token is scored, and at least one precedes it.
        batch_size: maximum number of rows per forward; None chooses by device.
        autocast: run the forward under torch.autocast with this dtype; log-probabilities are always float32.
    """
    device = next(model.parameters()).device
    logprobs, hits, order, counts = [], [], [], []
    with evaluating(model), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        for batch in plan(requests, model, device.type, batch_size):
            ids = np.zeros((len(batch.rows), batch.width), dtype=np.int64)
            for row, known in enumerate(batch.rows):
                ids[row, : len(known)] = known
            positions, targets = [], []
            for row, index in batch.members:
                tokens, scored = requests[index]
                end = row * batch.width + len(tokens) - 1
                positions.append(np.arange(end - scored, end))
                targets.append(np.asarray(tokens[-scored:]))
                order.append(index)
                counts.append(scored)
            logits_NV = selected_logits(model, _move(ids, device), _move(np.concatenate(positions), device))
            picked_N, likeliest_N = _pick(logits_NV, _move(np.concatenate(targets), device))
            logprobs.append(picked_N)
            hits.append(likeliest_N)
    if not requests:
        return []
    starts = np.cumsum([0, *counts[:-1]])
    sums = np.add.reduceat(torch.cat(logprobs).double().cpu().numpy(), starts)
    greedy = np.logical_and.reduceat(torch.cat(hits).cpu().numpy(), starts)
    scores = [Score(0.0, False)] * len(requests)
    for index, logprob, hit in zip(order, sums.tolist(), greedy.tolist(), strict=True):
        scores[index] = Score(logprob, hit)
    return scores


def plan(requests: Sequence[Request], model: Any, device: str, batch_size: int | None) -> Iterator[Batch]:
    """Batches of distinct inputs, longest first, so that running out of memory happens at the start or not at all."""
    inputs: dict[tuple[int, ...], list[int]] = {}
    for index, (tokens, scored) in enumerate(requests):
        if not 1 <= scored < len(tokens):
            raise ValueError(f"a request scores 1 to len(tokens) - 1 = {len(tokens) - 1} tokens, got {scored}")
        inputs.setdefault(tuple(tokens[:-1]), []).append(index)
    equal_lengths = divides_by_keys(model)
    bucket = 1 if equal_lengths else BUCKET
    longest = max_length(model)
    kind = "cpu" if device == "cpu" else "cuda"
    logits_limit = LOGITS_PER_FORWARD[kind] // model.config.get_text_config().vocab_size
    rows: list[tuple[int, ...]] = []
    members: list[tuple[int, int]] = []
    width = num_scored = 0
    for tokens in sorted(inputs, key=lambda row: (-len(row), row)):
        wanted = sum(requests[index].scored for index in inputs[tokens])
        full = (
            (len(rows) + 1) * width > TOKENS_PER_FORWARD[kind]
            or len(rows) == batch_size
            or num_scored + wanted > logits_limit
            or (equal_lengths and len(tokens) != width)
        )
        if rows and full:
            yield Batch(rows, width, members)
            rows, members, num_scored = [], [], 0
        if not rows:
            width = max(len(tokens), min(-(-len(tokens) // bucket) * bucket, longest))
        members += [(len(rows), index) for index in inputs[tokens]]
        rows.append(tokens)
        num_scored += wanted
    if rows:
        yield Batch(rows, width, members)


def selected_logits(model: Any, ids_BT: Tensor, positions_N: Tensor) -> Tensor:
    """Logits [N, V] at flat positions of [B, T]; the LM head, the largest product, runs for these positions only."""
    head = model.get_output_embeddings()
    chosen = False

    def choose(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal chosen
        hidden_BTM = args[0]
        if hidden_BTM.shape[:2] != ids_BT.shape:
            return args
        chosen = True
        return (hidden_BTM.flatten(0, 1)[positions_N].unsqueeze(0), *args[1:])

    # Through the model's own forward, so that a family's logit scaling or soft cap is applied.
    hook = None if head is None else head.register_forward_pre_hook(choose)
    try:
        logits = model(input_ids=ids_BT, use_cache=False).logits
    finally:
        if hook is not None:
            hook.remove()
    return logits[0] if chosen else logits.flatten(0, 1)[positions_N]


def _pick(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and whether it is the most likely token; float32, a few rows at a time."""
    kind = "cpu" if logits_NV.device.type == "cpu" else "cuda"
    rows = max(1, LOGITS_PER_CHUNK[kind] // logits_NV.shape[1])
    picked, likeliest = [], []
    for logits, targets in zip(logits_NV.split(rows), targets_N.split(rows), strict=True):
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        picked.append(logprobs.gather(1, targets[:, None])[:, 0])
        likeliest.append(logprobs.argmax(-1) == targets)
    return torch.cat(picked), torch.cat(likeliest)


def _move(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def mechanism_of(model: Any) -> dict[str, Any] | None:
    """The mechanism settings of a model; None for a model without a mechanism."""
    settings = getattr(model.config, "affine_attention", None)
    return settings["mechanism"] if isinstance(settings, dict) else None


def divides_by_keys(model: Any) -> bool:
    """True if padding changes earlier outputs, because beta = (running_alpha - alpha) / number of keys."""
    mechanism = mechanism_of(model)
    return mechanism is not None and mechanism["bias"] and mechanism["bias_length"] == "keys"


def max_length(model: Any) -> int:
    """The maximum sequence length of a model, from the same configuration keys as lm-evaluation-harness."""
    config = model.config.get_text_config()
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    return 2048


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Sets evaluation mode and restores the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def prefix_token(tokenizer: Any) -> int:
    """The token from which the first token of a text is predicted: BOS, or else EOS, as in lm-evaluation-harness."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError(
        "tokenizer must have a bos_token or an eos_token, from which the first token of a text is predicted, but "
        f"{type(tokenizer).__name__} has neither; set one, e.g. tokenizer.eos_token"
    )


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, with the special tokens of the tokenizer unless the text already starts with BOS."""
    prefix = tokenizer.decode([prefix_token(tokenizer)])
    encoded: list[list[int]] = [[]] * len(texts)
    for special in (True, False):
        chosen = [index for index, text in enumerate(texts) if text.startswith(prefix) is not special]
        if chosen:
            batch = [texts[index] for index in chosen]
            lists = tokenizer(batch, add_special_tokens=special, return_attention_mask=False, verbose=False)
            for index, ids in zip(chosen, lists["input_ids"], strict=True):
                encoded[index] = ids
    return encoded


def encode_pairs(tokenizer: Any, pairs: Sequence[tuple[str, str]], longest: int) -> list[Request]:
    """Contexts and continuations as requests, split and truncated like lm-evaluation-harness.

    Trailing spaces of a context move to the continuation. Both are tokenised together; the tokens after those of the
    context are the continuation. Requests that are too long are truncated from the left.
    """
    split = [(context.rstrip(), context[len(context.rstrip()) :] + rest) for context, rest in pairs]
    texts = list(dict.fromkeys(part for context, rest in split for part in (context, context + rest) if context))
    tokens = dict(zip(texts, encode(tokenizer, texts), strict=True))
    requests = []
    for context, rest in split:
        if context:
            before = tokens[context]
            after = tokens[context + rest][len(before) :]
        else:
            after = tokenizer.encode(rest, add_special_tokens=False)
            before = [prefix_token(tokenizer)]
            if after[:1] == before:
                after = after[1:]
        if not 1 <= len(after) <= longest:
            raise ValueError(
                f"a continuation must have 1 to {longest} tokens (the length of the model), got {len(after)} for "
                f"{rest[:60]!r} after {context[-60:]!r}"
            )
        requests.append(Request((before + after)[-(longest + 1) :], len(after)))
    return requests


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Equal for tokenizers that produce the same tokens; the key of cached tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr((tokenizer.name_or_path, sorted(tokenizer.get_vocab())))
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return hashlib.sha256(f"{type(tokenizer).__name__} {special} {text}".encode()).hexdigest()
