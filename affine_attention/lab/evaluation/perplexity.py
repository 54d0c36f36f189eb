"""Measures perplexity per token, word and byte on held-out documents, with the protocol of lm-evaluation-harness.

The first token of a document is predicted from BOS (or EOS), the others in windows of `length` tokens. With
`stride < length` a window overlaps the previous one and scores only its last `stride` tokens. With stride = length the
sums equal those of the harness's `loglikelihood_rolling` (max_length = length) up to the rounding of its float32 sums.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from .scoring import Request, encode, fingerprint_tokenizer, prefix_token, score

ARTICLE = re.compile(r"^ ?= [^=\n]+ = ?$", re.MULTILINE)


def perplexity(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    *,
    length: int,
    stride: int | None = None,
    batch_size: int | None = None,
    autocast: torch.dtype | None = None,
    cache: dict[Any, Any] | None = None,
) -> dict[str, Any]:
    """Perplexities of a model on documents, the token, word and byte counts, and the protocol.

    Args:
        model: a transformers causal LM.
        tokenizer: its tokenizer.
        documents: texts, scored independently of each other.
        length: tokens per window.
        stride: scored tokens of each window after the first; None: `length`, so that windows do not overlap.
        batch_size: maximum number of windows per forward; changes only the last digits.
        autocast: dtype of the forward.
        cache: a dict that keeps tokens for further models with the same tokenizer.
    """
    stride = length if stride is None else stride
    if length < 1 or not 1 <= stride <= length:
        raise ValueError(f"1 <= stride <= length must hold, got stride={stride} and length={length}")
    fingerprint = fingerprint_documents(documents)
    cache = {} if cache is None else cache
    key = ("documents", fingerprint_tokenizer(tokenizer), fingerprint)
    if key not in cache:
        cache[key] = encode(tokenizer, documents)
    kept = [(text, tokens) for text, tokens in zip(documents, cache[key], strict=True) if tokens]
    if not kept:
        raise ValueError(f"documents must hold at least one token, got {len(documents)} empty documents")

    prefix = prefix_token(tokenizer)
    requests, owners = [], []
    for owner, (_, tokens) in enumerate(kept):
        windows = rolling_windows(tokens, prefix, length, stride)
        requests += windows
        owners += [owner] * len(windows)
    parts: list[list[float]] = [[] for _ in kept]
    for owner, result in zip(owners, score(model, requests, batch_size=batch_size, autocast=autocast), strict=True):
        parts[owner].append(-result.logprob)
    # fsum rounds once, so the sums do not depend on the order of documents or windows.
    nlls = [math.fsum(part) for part in parts]
    counts = [len(tokens) for _, tokens in kept]
    # Counted like the harness: white space at either end of a document adds one word.
    words = sum(len(re.split(r"\s+", text)) for text, _ in kept)
    num_bytes = sum(len(text.encode()) for text, _ in kept)
    nll = math.fsum(nlls)
    return {
        "token": _exp(nll / sum(counts)),
        "word": _exp(nll / words),
        "byte": _exp(nll / num_bytes),
        "bits_per_byte": nll / num_bytes / math.log(2),
        "tokens": sum(counts),
        "words": words,
        "bytes": num_bytes,
        "documents": len(kept),
        "stderr": ratio_stderr(nlls, counts),
        "protocol": {
            "length": length,
            "stride": stride,
            "first_token_after": tokenizer.decode([prefix]),
            "windows": len(requests),
            "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
            "dtype": str(model.dtype).removeprefix("torch."),
            "documents_sha256": fingerprint,
        },
    }


def rolling_windows(tokens: Sequence[int], prefix: int, length: int, stride: int) -> list[Request]:
    """Requests that score each token of a document once; each model input has at most `length` tokens.

    >>> [(list(w.tokens), w.scored) for w in rolling_windows([1, 2, 3, 4, 5], prefix=0, length=2, stride=2)]
    [([0, 1, 2], 2), ([2, 3, 4], 2), ([3, 4, 5], 1)]
    """
    first = min(length, len(tokens))
    windows = [Request([prefix, *tokens[:first]], first)] if tokens else []
    done = first
    while done < len(tokens):
        end = min(done + stride, len(tokens))
        windows.append(Request(tokens[end - length - 1 : end], end - done))
        done = end
    return windows


def split_articles(documents: list[str]) -> list[str]:
    """Splits WikiText without blank lines, which is read as one document, at its title lines ` = Title = `."""
    if len(documents) != 1 or not re.match(ARTICLE, documents[0]):
        return documents
    starts = [found.start() for found in re.finditer(ARTICLE, documents[0])]
    ends = [*starts[1:], len(documents[0])]
    return [documents[0][start:end].strip() for start, end in zip(starts, ends, strict=True)]


def ratio_stderr(nlls: Sequence[float], counts: Sequence[int]) -> float | None:
    """Standard error over documents of sum(nlls) / sum(counts), linearised; None for a single document."""
    n = len(nlls)
    if n < 2:
        return None
    mean = math.fsum(nlls) / sum(counts)
    squares = math.fsum((nll - mean * count) ** 2 for nll, count in zip(nlls, counts, strict=True))
    return math.sqrt(n / (n - 1) * squares) / sum(counts)


def fingerprint_documents(documents: Sequence[str]) -> str:
    """A hash of the documents in their order."""
    digest = hashlib.sha256()
    for text in documents:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
