"""Loads a tokenizer by name, folder or file, or trains a byte-level BPE, and encodes documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ...files import expanded

SEPARATOR = "<|endoftext|>"
# Common end-of-text tokens, for a bare tokenizer.json, which does not name its own.
KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
SMALLEST_VOCABULARY = 257  # 256 bytes and the separator
LARGEST_VOCABULARY = 2**24
BATCH_CHARACTERS = 2_000_000  # encoding them takes about 0.1 GB of memory


def load_tokenizer(tokenizer: str | Path | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer from the hub, a folder, or a bare `tokenizer.json`. No code of a repository is run."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    path = expanded(tokenizer, "tokenizer")
    if path.is_dir() and not (path / "tokenizer_config.json").is_file() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    if path.is_file():
        if path.suffix != ".json":
            raise ValueError(f"tokenizer must be a name, a folder or a tokenizer.json, got the file {path}")
        try:
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ValueError(f"{path} is not a tokenizer.json of the tokenizers library ({error})") from error
    from transformers import AutoTokenizer  # a slow import

    try:
        return AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, and others for damaged files
        raise ValueError(
            f"tokenizer {str(tokenizer)!r} cannot be loaded; use a hub name, a folder with tokenizer files, or a "
            f"tokenizer.json ({str(error).splitlines()[0]})"
        ) from error


def train_tokenizer(documents: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE. The same documents in the same order give the same tokenizer.

    It can be smaller than `vocabulary_size` if the text has too few pairs to merge.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check_vocabulary_size(vocabulary_size)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size, special_tokens=[SEPARATOR], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    # In pieces: the library stores every word of a text with its offset while it splits the text.
    backend.train_from_iterator((piece for text in documents for piece in _pieces(text)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SEPARATOR)


def check_vocabulary_size(vocabulary_size: int | None) -> None:
    if vocabulary_size is None:
        raise ValueError("without a tokenizer, one is trained on the data: set vocabulary_size, or pass a tokenizer")
    if isinstance(vocabulary_size, bool) or not isinstance(vocabulary_size, int):
        raise TypeError(f"vocabulary_size must be an integer, got {vocabulary_size!r}")
    if vocabulary_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocabulary_size must be at least {SMALLEST_VOCABULARY} (every byte and {SEPARATOR}), got "
            f"{vocabulary_size}"
        )
    if vocabulary_size > LARGEST_VOCABULARY:
        raise ValueError(f"vocabulary_size must be at most {LARGEST_VOCABULARY:,}, got {vocabulary_size}")


class DocumentEncoder:
    """Encodes documents: the tokenizer's prefix (BOS or nothing), the tokens of the text, the separator.

    Special tokens in the text, such as <|endoftext|>, are encoded as plain text and do not end the document.
    `special_tokens=True` parses them as special tokens, for text that was prepared with them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, separator: str | None = None, special_tokens: bool = False
    ) -> None:
        self.special_tokens = special_tokens
        self.separator, separator_id = _separator(tokenizer, separator)
        self.first = _first_tokens(tokenizer)
        self.tail = [separator_id]
        # The largest possible id, and the smallest dtype that holds it.
        self.largest_id = max(*tokenizer.get_vocab().values(), *self.tail, *self.first)
        self.dtype = np.dtype("<u2" if self.largest_id < 2**16 else "<u4")
        # A copy, because truncation and padding, which a tokenizer file may enable, are switched off.
        self.backend: Any = None
        self.tokenizer = tokenizer
        if tokenizer.is_fast:
            from tokenizers import Tokenizer

            self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self.backend.no_truncation()
            self.backend.no_padding()
            self.backend.encode_special_tokens = not special_tokens

    def fingerprint(self) -> str:
        """A hash of everything that affects the encoding of a document."""
        if self.backend is not None:
            content = self.backend.to_str()
        else:
            content = repr((type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items())))
        return hashlib.sha256(repr((content, self.first, self.tail, self.special_tokens)).encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each document. At most one batch of text is encoded at a time, also within a long document."""
        pieces = [_pieces(text) for text in texts]
        flat = (piece for document in pieces for piece in document)
        found = (ids for batch in batched(flat, BATCH_CHARACTERS) for ids in self._encode(batch))
        ends = np.asarray(self.first, self.dtype), np.asarray(self.tail, self.dtype)
        return [np.concatenate([ends[0], *(next(found) for _ in document), ends[1]]) for document in pieces]

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if self.backend is not None:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
            return [np.asarray(encoding.ids, self.dtype) for encoding in encodings]
        encoded = self.tokenizer(
            texts, add_special_tokens=False, truncation=False, split_special_tokens=not self.special_tokens
        )["input_ids"]
        return [np.asarray(ids, self.dtype) for ids in encoded]


def batched(documents: Iterable[str], characters: int = BATCH_CHARACTERS) -> Iterator[list[str]]:
    """Lists of documents with about `characters` characters in total."""
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> list[str]:
    """Splits a very long document at line ends, to bound memory; a shorter one is returned as a single piece."""
    pieces = []
    while len(text) > BATCH_CHARACTERS:
        cut = text.rfind("\n", 1, BATCH_CHARACTERS) + 1 or BATCH_CHARACTERS
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]


def _separator(tokenizer: PreTrainedTokenizerBase, separator: str | None) -> tuple[str, int]:
    vocabulary = tokenizer.get_vocab()
    wanted = separator or tokenizer.eos_token
    if wanted is None:
        wanted = next((token for token in KNOWN_SEPARATORS if token in vocabulary), None)
        if wanted is None:
            raise ValueError("the tokenizer has no end-of-text token; choose one of its tokens with separator=")
    if wanted not in vocabulary:
        raise ValueError(f"separator must be a token of the tokenizer, got {wanted!r}")
    return wanted, vocabulary[wanted]


def _first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """[bos] if the tokenizer starts every text with it (LLaMA 3 does, Qwen and SmolLM2 do not)."""
    empty = list(tokenizer("")["input_ids"])
    return [empty[0]] if empty and empty[0] == tokenizer.bos_token_id else []
