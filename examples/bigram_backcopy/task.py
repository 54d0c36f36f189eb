"""Makes sequences of the Bigram-Backcopy task from the character statistics of a text.

A sequence starts with <s> and one character that is no trigger. After a trigger, the next token repeats the token
before the trigger; after any other token, it is drawn from the bigram statistics:

    <s>  h  o  u  e  u  g  h  t  h  i  ...      e and t are triggers: u e u, h t h

Only the tokens after a trigger need attention. Everywhere else the current token determines the best prediction, and
attention has nothing to add: the head should be off. A softmax head cannot be off, because its weights sum to one. Guo
et al. show that it puts them on <s> instead, whose value becomes small.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import affine_attention

TEXT = Path(affine_attention.__file__).parent / "lab" / "embedded" / "gutenberg_pd_mini.txt"
CHARACTERS = 64  # the most frequent characters of the text; rarer ones are left out
TRIGGERS = 3  # the most frequent characters are triggers, as in the authors' main experiment


@dataclass(frozen=True)
class Task:
    """The statistics from which sequences are drawn; token `len(characters)` is <s>."""

    characters: str
    unigram: Tensor  # [V - 1], fp64
    bigram: Tensor  # [V - 1, V - 1], fp64; row i holds the probabilities of the token after i

    @property
    def vocabulary_size(self) -> int:
        return len(self.characters) + 1

    @property
    def start(self) -> int:
        return len(self.characters)

    def is_trigger(self, tokens: Tensor) -> Tensor:
        return tokens < TRIGGERS

    def sample(self, sequences: int, length: int, seed: int) -> Tensor:
        """Sequences [N, length + 1] of int64: inputs are all columns but the last, labels all but the first."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.empty(sequences, length + 1, dtype=torch.int64)
        tokens[:, 0] = self.start
        first = self.unigram.clone()
        first[:TRIGGERS] = 0
        tokens[:, 1] = torch.multinomial(first, sequences, replacement=True, generator=generator)
        # Inverse of the cumulative distribution: one uniform number per token. Row i of the table lies in [i, i + 1].
        cumulative = self.bigram.cumsum(1)
        table = (cumulative / cumulative[:, -1:] + torch.arange(len(cumulative))[:, None]).flatten()
        for position in range(2, length + 1):
            before, current = tokens[:, position - 2], tokens[:, position - 1]
            uniform = torch.rand(sequences, generator=generator, dtype=torch.float64)
            drawn = torch.searchsorted(table, uniform + current, right=True) - current * len(cumulative)
            tokens[:, position] = torch.where(self.is_trigger(current), before, drawn.clamp(max=len(cumulative) - 1))
        return tokens

    def best_loss(self, tokens: Tensor) -> Tensor:
        """The loss [N, T] of the true distribution at every label: 0 after a trigger, −log P(label | token) elsewhere.

        The label of <s> follows the unigrams without triggers.
        """
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        first = self.unigram.clone()
        first[:TRIGGERS] = 0
        table = torch.cat([self.bigram, (first / first.sum())[None]])
        return (-table[inputs, labels].log()).masked_fill(self.is_trigger(inputs), 0).float()


def make_task(text: Path = TEXT) -> Task:
    """The task with the statistics of the characters of a text."""
    letters = text.read_text(encoding="utf-8")
    counts: dict[str, int] = {}
    for letter in letters:
        counts[letter] = counts.get(letter, 0) + 1
    characters = "".join(sorted(counts, key=lambda letter: (-counts[letter], letter))[:CHARACTERS])
    number = {letter: index for index, letter in enumerate(characters)}
    ids = torch.tensor([number[letter] for letter in letters if letter in number])
    size = len(characters)
    pairs = torch.bincount(ids[:-1] * size + ids[1:], minlength=size * size).view(size, size).double()
    unigram = torch.bincount(ids, minlength=size).double()
    return Task(characters, unigram / unigram.sum(), pairs / pairs.sum(1, keepdim=True))
