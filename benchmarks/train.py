"""Measures tokens per second and MFU of distillation with `lab.train`, for each mechanism, interleaved.

    python -m benchmarks.train [--mechanisms softmax affine] [--student llama-100m] [--teacher llama-100m] [--write]

The teacher has random weights unless a folder is given, which does not change its cost. Runs of the mechanisms
alternate. The first steps of each run, which fill caches and compile, are skipped, and the median step is reported.
MFU counts the student's forward and backward (6N and causal attention); a second column adds the teacher's forward.
Both are relative to the bf16 peak of the device. Targets on one H200: affine at least 0.95x softmax, and at least 35 %
MFU for 100M parameters at T = 2048.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from affine_attention import hf
from affine_attention.lab.estimate import meta_teacher, peak_flops, training_flops_per_token
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.train import train
from affine_attention.recipes import EMBEDDED_TEXT, with_training_length
from benchmarks.results_file import table, write

WARM_UP = 8  # skipped steps of each run
SPEED_BAR, MFU_BAR = 0.95, 0.35


def make_teacher(name: str, vocabulary: int, folder: Path) -> str:
    torch.manual_seed(1)
    hf.detach(hf.student(name, "softmax", vocab_size=vocabulary)).save_pretrained(folder)
    return str(folder)


def make_recipe(given: argparse.Namespace, mechanism: str, tokenizer: str, teacher: str | None) -> Recipe:
    on_gpu = given.device == "cuda"
    settings: dict[str, Any] = {
        "mechanism": mechanism, "student": given.student, "student_changes": student_changes(given),
        "data": (EMBEDDED_TEXT,), "heldout": 0.05, "tokenizer": tokenizer, "teacher": teacher,
        "sequence_length": given.length, "global_batch": given.batch, "device_batch": given.device_batch,
        "steps": given.steps, "warmup_steps": 5, "decay_steps": 0, "save_every": 0, "probe_every": 0,
        "dtype": "bfloat16" if on_gpu else "float32", "compile": given.compile, "keep_checkpoints": 1,
    }  # fmt: skip
    return with_training_length(Recipe().with_settings(settings))


def student_changes(given: argparse.Namespace) -> dict[str, Any]:
    layers = {} if given.layers is None else {"num_hidden_layers": given.layers}
    return {"vocab_size": given.vocabulary} | layers


def measure(given: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds of every measured step, by mechanism."""
    from affine_attention.lab.data import read_documents, train_tokenizer

    teacher, tokenizer = teacher_of(given, folder), tokenizer_of(given, folder)
    if not Path(tokenizer).is_dir():
        train_tokenizer(read_documents(EMBEDDED_TEXT), min(given.vocabulary, 8192)).save_pretrained(tokenizer)
    if teacher is not None and teacher != given.teacher:
        from transformers import AutoTokenizer

        make_teacher(given.teacher, given.vocabulary, Path(teacher))
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(teacher)
    seconds: dict[str, list[float]] = {mechanism: [] for mechanism in given.mechanisms}
    for turn in range(given.rounds):
        for mechanism in given.mechanisms:
            recipe = make_recipe(given, mechanism, tokenizer, teacher)
            run = RunFolder(folder / f"{mechanism}-{turn}")
            train(recipe, run.path, quiet=True, device=given.device)
            speeds = [line["tokens_per_second"] for line in run.log()[WARM_UP:]]
            seconds[mechanism] += [recipe.tokens_per_step / speed for speed in speeds]
            print(f"{mechanism}, turn {turn}: {statistics.median(speeds):,.0f} tokens/s", flush=True)
    return seconds


def teacher_of(given: argparse.Namespace, folder: Path) -> str | None:
    """The folder of the teacher: the given one, or a new one with random weights."""
    if given.teacher is None:
        return None
    return given.teacher if Path(given.teacher).is_dir() else str(folder / "teacher")


def tokenizer_of(given: argparse.Namespace, folder: Path) -> str:
    return given.teacher if given.teacher and Path(given.teacher).is_dir() else str(folder / "tokenizer")


def profile(given: argparse.Namespace, folder: Path, mechanism: str, rows: int = 25) -> list[str]:
    """The time of a step by kernel, averaged over three steps."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    short = argparse.Namespace(**{**vars(given), "steps": WARM_UP + 5})
    recipe = make_recipe(short, mechanism, tokenizer_of(given, folder), teacher_of(given, folder))
    on_gpu = given.device == "cuda"
    watched = torch_profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])

    def on_step(record: dict[str, Any]) -> None:
        if record["step"] == WARM_UP:
            watched.start()
        elif record["step"] == WARM_UP + 3:
            if on_gpu:
                torch.cuda.synchronize()
            watched.stop()

    train(recipe, folder / "profiled", quiet=True, device=given.device, on_step=on_step)
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels = [(event.key, getattr(event, time_of) / 3e3, event.count / 3) for event in watched.key_averages()]
    kernels = sorted((kernel for kernel in kernels if kernel[1] > 0), key=lambda kernel: -kernel[1])
    total = sum(kernel[1] for kernel in kernels)
    shown = [
        [f"`{name[:90]}`", f"{each:.2f}", f"{each / total:.1%}", f"{count:.0f}"] for name, each, count in kernels[:rows]
    ]
    return [
        f"Kernels of one step of `{mechanism}` ({total:.1f} ms in total), mean of three steps:", "",
        *table(["kernel", "ms", "share", "launches"], shown), "",
    ]  # fmt: skip


def flops(given: argparse.Namespace, mechanism: str, with_teacher: bool) -> float:
    student = hf.student(given.student, mechanism, device="meta", **student_changes(given))
    teacher = None
    if with_teacher and given.teacher and Path(given.teacher).is_dir():
        teacher = meta_teacher(given.teacher)
    elif with_teacher and given.teacher:
        teacher = hf.student(given.teacher, "softmax", device="meta", vocab_size=given.vocabulary)
    return training_flops_per_token(student, given.length, teacher)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "affine"])
    parser.add_argument("--student", default="llama-100m")
    parser.add_argument("--layers", type=int, default=None, help="number of layers of the student (default: unchanged)")
    parser.add_argument(
        "--teacher",
        default=None,
        help="a folder, or the name of a student for a random teacher of its shape (default: no teacher)",
    )
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device-batch", type=int, default=None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--label", default="train", help="first part of the result's file name")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = {name: statistics.median(each) for name, each in measure(given, Path(folder)).items()}
        lines = describe(given, seconds)
        print("\n".join(lines), flush=True)  # print before the profile, which may be slow or fail
        if given.profile:
            lines += profile(given, Path(folder), given.mechanisms[-1])
    if given.write:
        write(given.label, given.device, "Distillation with `affine train`", lines)


def describe(given: argparse.Namespace, seconds: dict[str, float]) -> list[str]:
    tokens, peak = given.batch * given.length, peak_flops(given.device)
    base = seconds[given.mechanisms[0]]
    rows = []
    for name, each in seconds.items():
        shares = [
            "" if peak is None else f"{flops(given, name, with_teacher) * tokens / each / peak:.1%}"
            for with_teacher in (False, True)
        ]
        rows.append([name, f"{each * 1e3:.1f}", f"{tokens / each:,.0f}", f"{base / each:.3f}", *shares])
    return [
        f"{given.student}{f' with {given.layers} layers' if given.layers else ''}, teacher {given.teacher or 'none'}, "
        f"vocabulary {given.vocabulary:,}, {given.length} tokens, "
        f"{given.batch} sequences per step ({given.device_batch or given.batch} per micro-batch), "
        f"{'compiled layers' if given.compile else 'eager'}, {given.rounds} interleaved runs of {given.steps} steps.",
        "",
        *table(["mechanism", "step, ms", "tokens/s", f"speed over {given.mechanisms[0]}", "MFU", "with teacher"], rows),
        "",
        f"Targets: speed {SPEED_BAR}, MFU {MFU_BAR:.0%}.",
        "",
    ]


if __name__ == "__main__":
    main()
