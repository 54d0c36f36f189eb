"""Sets single numbers of run folders, so that tests know the difference that the report must find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from affine_attention.files import write_json


def set_loss(folder: Path, loss: float, **more: float) -> Path:
    """Every step has this training loss, and these other numbers."""
    lines = [json.loads(line) | {"loss": loss, **more} for line in (folder / "log.jsonl").read_text().splitlines()]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def set_perplexity(folder: Path, word: float, name: str = "c4") -> Path:
    """The perplexity per word of a held-out set."""
    evaluation = json.loads((folder / "evaluation.json").read_text())
    evaluation["perplexity"][name]["word"] = word
    write_json(folder / "evaluation.json", evaluation)
    return folder


def set_inspection(folder: Path, **parts: Any) -> Path:
    """Parts of inspection.json; a table is merged with what is there."""
    inspection = json.loads((folder / "inspection.json").read_text())
    for key, value in parts.items():
        old = inspection.get(key)
        inspection[key] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    write_json(folder / "inspection.json", inspection)
    return folder
