"""Stores runs without weights: recipe, manifest, log, events, evaluation and inspection, compressed.

    python -m studies.store RUNS TARGET [--maps NAME ...]

RUNS is a study folder; each run becomes a folder of about 100 kB in TARGET, from which `affine report` makes the same
tables and figures. Numbers in the log are rounded to seven digits; attention maps are stored only for the named runs.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

from affine_attention.lab.run import RunFolder

PLAIN = ("recipe.json", "manifest.json", "events.jsonl", "evaluation.json")
DIGITS = 7


def store(run: RunFolder, target: Path, maps: bool = False) -> None:
    """Stores one run; existing files in the target are replaced."""
    target.mkdir(parents=True, exist_ok=True)
    for name in PLAIN:
        if (run.path / name).is_file():
            shutil.copyfile(run.path / name, target / name)
    lines = [json.dumps(shortened(line), separators=(",", ":")) for line in run.log()]
    _write(target / "log.jsonl.xz", "".join(f"{line}\n" for line in lines))
    if run.inspection_file.is_file():
        inspection = json.loads(run.inspection_file.read_text(encoding="utf-8"))
        _write(target / "inspection.json.xz", json.dumps(shortened(inspection), separators=(",", ":")))
    if maps and run.maps_file.is_file():
        (target / "inspection").mkdir(exist_ok=True)
        shutil.copyfile(run.maps_file, target / "inspection" / run.maps_file.name)


def shortened(value: Any) -> Any:
    """The value with floats rounded to seven digits, the precision of float32."""
    if isinstance(value, dict):
        return {key: shortened(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shortened(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _write(path: Path, text: str) -> None:
    path.write_bytes(lzma.compress(text.encode("utf-8"), preset=9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--maps", nargs="*", default=[], metavar="NAME", help="runs whose attention maps are stored")
    given = parser.parse_args()
    runs = [RunFolder(path) for path in sorted(given.runs.iterdir()) if RunFolder(path).exists]
    for run in runs:
        store(run, given.target / run.path.name, run.path.name in given.maps)
    print(f"{len(runs)} runs, {sum(f.stat().st_size for f in given.target.rglob('*') if f.is_file()):,} bytes")


if __name__ == "__main__":
    main()
