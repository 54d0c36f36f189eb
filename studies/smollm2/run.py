"""Runs the study of docs/study.md: students of 30M and 60M parameters learn from SmolLM2-135M, one GPU, half an hour.

    python -m studies.smollm2.make_teacher DATA/teacher teacher
    python -m studies.smollm2.run DATA teacher studies/smollm2/runs [--parallel 6] [--parts rates main large lower]

DATA holds corpus/*.train.txt.xz and *.val.txt, heldout/ (C4, WikiText-2) and evals/ (the tasks' records). Every part is
one `affine study`, whose command is printed; started again, it goes on where it stopped. The parts:

rates: softmax and affine at three learning rates. The rate at which *softmax* has the lowest loss on held-out text is
    that of all other runs, so that no mechanism wins because the baseline's rate was wrong.
main: all eight mechanisms and the questions on which the paper is silent, each with every seed.
large: students of twice the size.
lower: softmax and affine at half the paper's rate, since the best of the three rates was the lowest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from affine_attention.lab.run import RunFolder

RATES = (1e-3, 2e-3, 4e-3)  # the paper's, and two more: small models take higher ones
LOWER_RATE = 5e-4
MECHANISMS = ("softmax", "affine", "sink", "gated", "head_gated", "affine_no_bias", "affine_gated")
# Sigmoid against linear clipping is Table 3; on the others the paper is silent.
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
TASKS = ("lambada_openai", "piqa", "hellaswag", "arc_easy")  # those in which the teacher is well above chance


def command(given: argparse.Namespace, student: str, mechanisms: list[str], seeds: list[int], more: dict) -> list[str]:
    """One `affine study` of this study; `more` are settings of its own."""
    data = given.data
    settings = {
        "name": student,
        "tokenizer": given.teacher,
        "heldout": [f"{data}/corpus/{text}.val.txt" for text in TEXTS],
        "student_changes": STUDENTS[student],
        "global_batch": 8,  # 8 x 1024 tokens: many steps of few tokens, where the paper has 9,000 of two million
        "steps": 1200,
        "warmup_steps": 100,  # the paper's number
        "decay_steps": 120,  # a tenth, as in the recipes of the paper
        "save_every": 0,
        "keep_checkpoints": 1,
        "probe_every": 50,
        "compile": True,
        "remember_teacher": True,
    } | more | dict(setting.split("=", 1) for setting in given.settings)  # fmt: skip
    texts = {"c4": f"{data}/heldout/c4_en_train_first1000.jsonl", "wikitext2": f"{data}/heldout/wikitext2_raw_test.txt"}
    texts |= {text: f"{data}/corpus/{text}.val.txt" for text in TEXTS}
    return [
        *(sys.executable, "-m", "affine_attention", "study", "--recipe", "small_gpu", "--teacher", given.teacher),
        *("--data", f"{data}/corpus/{given.corpus}", "--out", given.out, "--mechanisms", ",".join(mechanisms)),
        *("--seeds", ",".join(map(str, seeds)), "--parallel", str(given.parallel), "--discard-weights"),
        *("--engine", "direct", "--tasks", ",".join(TASKS), "--task-data", f"{data}/evals"),
        *(part for name, file in texts.items() for part in ("--perplexity", f"{name}={file}")),
        *(part for key, value in settings.items() for part in ("--set", f"{key}={_text(value)}")),
        *(("--device", given.device) if given.device else ()),
    ]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def run(words: list[str]) -> None:
    print(" ".join(words[1:]), flush=True)
    subprocess.run(words, check=True)


def choose_rate(out: Path) -> float:
    """The rate of the lowest held-out loss of softmax; its runs become the first seed of the main part."""

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
    parser.add_argument("--corpus", default="*.train.txt.xz", help="which files of the corpus to train on")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="for a trial")
    parser.add_argument("--device")
    given = parser.parse_args()
    if "rates" in given.parts and not (Path(given.out) / "rate.json").exists():
        variants = [f"{mechanism}+learning_rate={rate}" for rate in RATES for mechanism in ("softmax", "affine")]
        run(command(given, "30m", variants, [0], {}))
    rate = choose_rate(Path(given.out))
    if "main" in given.parts:
        run(command(given, "30m", [*MECHANISMS, *QUESTIONS], given.seeds, {"learning_rate": rate}))
    if "large" in given.parts:
        large = argparse.Namespace(**vars(given) | {"out": f"{given.out}-60m"})
        run(command(large, "60m", list(LARGE), given.seeds[:1], {"learning_rate": rate}))
    if "lower" in given.parts:
        run(command(given, "30m", [f"{m}+learning_rate={LOWER_RATE}" for m in ("softmax", "affine")], [0], {}))


if __name__ == "__main__":
    main()
