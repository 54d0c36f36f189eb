"""Documents for the tests of the data: made of words, all different."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = ["the", "river", "stone", "light", "of", "a", "morning", "under", "old", "trees", "seven", "birds", "rain"]
SHARED = Path(__file__).parents[4] / "shared" / "data"


def make_documents(count: int, seed: int = 0, words: int = 40) -> list[str]:
    """Documents of two lines; the number in the first makes each different."""
    rng = random.Random(seed)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(3, words))) for _ in range(2 * count)]
    return [f"Title {seed} {i}\n{lines[2 * i]}\n{lines[2 * i + 1]}" for i in range(count)]


def write_text(path: Path, documents: list[str]) -> Path:
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return path


def write_json_lines(path: Path, documents: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text, "id": i}) + "\n" for i, text in enumerate(documents)))
    return path


DOCUMENTS = make_documents(120)
