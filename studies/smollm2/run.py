"""Runs the study of docs/study.md: students of 30M and 60M parameters distilled from SmolLM2-135M, on one GPU.

    python -m studies.smollm2.make_teacher DATA/teacher teacher
    python -m studies.smollm2.run DATA teacher studies/smollm2/runs [--parallel 6] [--parts rates main large lower]

DATA holds corpus/*.train.txt.xz and *.val.txt, heldout/ (C4, WikiText-2) and evals/ (task files). Each part is one
study; after an interruption, the same command resumes. The parts:

rates: softmax and affine at three learning rates. All other runs use the rate at which *softmax* has the lowest
    held-out loss, so that no mechanism wins because of a bad rate for the baseline.
main: all eight mechanisms and the questions that the paper leaves open, with every seed.
large: students of twice the size.
lower: softmax and affine at half the paper's rate, because the lowest of the three rates was the best.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from affine_attention.lab.recipe import parse_setting
from affine_attention.lab.run import RunFolder
from affine_attention.study import Plan, run_study

RATES = (1e-3, 2e-3, 4e-3)  # the paper's, and two higher ones, which small models often need
LOWER_RATE = 5e-4
MECHANISMS = ("softmax", "affine", "sink", "gated", "head_gated", "affine_no_bias", "affine_gated")
# Sigmoid versus linear clipping is Table 3; the paper leaves the others open.
QUESTIONS = (
    "affine+activation=sigmoid", "affine+bias_length=visible", "affine+running_alpha_start=0.5",
    "softmax+teacher=none", "affine+teacher=none", "off_by_one",
)  # fmt: skip
PARTS = ["rates", "main", "large", "lower"]
LARGE = ("softmax", "affine", "gated", "affine_gated")
STUDENTS = {
    "30m": {"vocab_size": 49152, "num_hidden_layers": 11},
    "60m": {"vocab_size": 49152, "hidden_size": 640, "intermediate_size": 1712, "num_hidden_layers": 14,
            "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 64},
}  # fmt: skip
TEXTS = ("wikipedia2006", "openstax", "elife", "novels")
TASKS = ("lambada_openai", "piqa", "hellaswag", "arc_easy")  # tasks on which the teacher is well above chance


def make_plan(
    given: argparse.Namespace, student: str, mechanisms: Sequence[str], seeds: Sequence[int], **more: Any
) -> Plan:
    """The plan of one part; `more` are its own settings."""
    heldout = {text: f"{given.data}/corpus/{text}.val.txt" for text in TEXTS}
    settings = {
        "name": student,
        "teacher": given.teacher,
        "tokenizer": given.teacher,
        "data": (f"{given.data}/corpus/{given.corpus}",),
        "heldout": tuple(heldout.values()),
        "student_changes": STUDENTS[student],
        "global_batch": 8,  # 8 x 1024 tokens: many small steps, where the paper has 9,000 steps of two million tokens
        "steps": 1200,
        "warmup_steps": 100,  # the paper's number
        "decay_steps": 120,  # a tenth, as in the recipes of the paper
        "save_every": 0,
        "keep_checkpoints": 1,
        "probe_every": 50,
        "compile": True,
        "remember_teacher": True,
    }
    return Plan(
        recipe="small_gpu",
        mechanisms=tuple(mechanisms),
        seeds=tuple(seeds),
        settings=settings | more | dict(parse_setting(text) for text in given.settings),
        perplexity={
            "c4": f"{given.data}/heldout/c4_en_train_first1000.jsonl",
            "wikitext2": f"{given.data}/heldout/wikitext2_raw_test.txt",
        }
        | heldout,
        tasks=TASKS,
        task_data=Path(given.data) / "evals",
        engine="direct",
    )


def choose_rate(out: Path) -> float:
    """The rate with the lowest held-out loss of softmax; its runs become the first seed of the main part."""

    def folder(mechanism: str, rate: float) -> Path:
        return out / f"{mechanism}_learning_rate={rate}-seed0"

    chosen_file = out / "rate.json"
    if not chosen_file.exists():
        losses = {rate: RunFolder(folder("softmax", rate)).log()[-1]["eval_loss"] for rate in RATES}
        rate = min(losses, key=losses.__getitem__)
        chosen_file.write_text(json.dumps({"rate": rate, "softmax_eval_loss": losses}, indent=1) + "\n")
    rate = json.loads(chosen_file.read_text())["rate"]
    for mechanism in ("softmax", "affine"):
        if folder(mechanism, rate).exists():
            folder(mechanism, rate).rename(out / f"{mechanism}-seed0")
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("teacher")
    parser.add_argument("out")
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--corpus", default="*.train.txt.xz", help="training files of the corpus")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="change a setting, for a trial"
    )
    parser.add_argument("--device")
    given = parser.parse_args()

    def run(plan: Plan, out: str = given.out) -> None:
        run_study(plan, out, device=given.device, parallel=given.parallel, keep_weights=False)

    if "rates" in given.parts and not (Path(given.out) / "rate.json").exists():
        variants = [f"{mechanism}+learning_rate={rate}" for rate in RATES for mechanism in ("softmax", "affine")]
        run(make_plan(given, "30m", variants, [0]))
    rate = choose_rate(Path(given.out))
    if "main" in given.parts:
        run(make_plan(given, "30m", [*MECHANISMS, *QUESTIONS], given.seeds, learning_rate=rate))
    if "large" in given.parts:
        run(make_plan(given, "60m", LARGE, given.seeds[:1], learning_rate=rate), f"{given.out}-60m")
    if "lower" in given.parts:
        run(make_plan(given, "30m", [f"{m}+learning_rate={LOWER_RATE}" for m in ("softmax", "affine")], [0]))


if __name__ == "__main__":
    main()
