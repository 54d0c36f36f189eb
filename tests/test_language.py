"""Tracked files use the field's standard terms: no phrase of the glossary's "never" column is left."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Phrase -> the usual term. Regular expressions, matched without case in comments, docstrings, messages and docs.
GLOSSARY = {
    r"\bcopy engines?\b(?! for cudaMemcpy)": "TMA (tensor memory accelerator)",
    r"\bmatrix units?\b": "tensor cores",
    r"\bstreaming processors?\b|\bprocessors? of (the|a) GPU\b|\b(a|every|each|one|per) processor\b": "SM",
    r"\bshares? (a|the) processor\b|\bfinds? no registers\b": "occupancy, register spill",
    r"\bthe pass before the backward\b": "preprocess kernel",
    r"\bw(o|i)ns? back\b|\bhas eaten\b|\beaten by\b|\bfaint (rows?|quer(y|ies))\b": "recomputed, lost to rounding",
    r"\bstands? behind\b": "is queued behind",
    r"\bgets? every processor\b": "fills all SMs",
    r"\bwrong without a word\b|\bwithout a word\b": "silently wrong",
    r"\bmakes? every old \w+ unseen\b": "invalidates the cache",
    r"\bfinds? room\b": "reuses the buffer",
    r"\bis no label\b|\bare no labels\b": "ignored label",
    r"\b(is|are|be|by|no) (mere |pure )?luck\b": "high variance",
    r"\bd(id|oes) not pay( off)?[.,;:)]": "did not help",
    r"\bc(o|a)mes? out alike\b": "bitwise equal",
    r"\bhushed\b|\bwhoever begins\b|\bthe former[.,;:)]|\bthe latter[.,;:)]|\bstrangers\b": "plain words",
    r"\b(claim|guard|places|remembered|inside)\.py\b": "lock, signals, stream_position, teacher_cache",
    r"\bGENERATES_NOT\b|\b_teachers_word\b|\b_ill\b": "a telling name",
}
SUFFIXES = (".py", ".md", ".js", ".css", ".toml", ".cfg", ".yaml", ".yml", ".txt", ".sh", "Makefile")
# The two files that list such phrases, the embedded training text, and stored results.
EXCLUDED = ("tests/test_language.py", "tests/test_docs.py", "affine_attention/lab/embedded/", "benchmarks/results/")


def tracked() -> list[str]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    return [name for name in names if name.endswith(SUFFIXES) and not name.startswith(EXCLUDED)]


@pytest.mark.parametrize("phrase", GLOSSARY)
def test_no_phrase_of_the_glossary_is_used(phrase):
    pattern = re.compile(phrase, re.IGNORECASE)
    found = []
    for name in tracked():
        text = (ROOT / name).read_text(encoding="utf-8")
        flat = re.sub(r"\s*\n\s*(#|//|\*)?\s*", " ", text)  # a phrase may be broken over two lines
        if pattern.search(flat):
            found += [f"{name}:{n}" for n, line in enumerate(text.split("\n"), 1) if pattern.search(line)] or [name]
    assert not found, f"write {GLOSSARY[phrase]!r}: {', '.join(found)}"


def test_the_patterns_find_what_they_are_for():
    sample = "two programs share a processor, the copy engine stands behind, and nothing is wrong without a word"
    assert sum(bool(re.search(phrase, sample)) for phrase in GLOSSARY) >= 4
