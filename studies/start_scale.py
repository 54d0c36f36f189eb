"""Tests whether gates beat softmax early in training only because their attention starts weaker.

    python -m studies.start_scale OUT [--seeds 0 1 2]

alpha and the gates are about one half before the first step, so attention's part of the residual stream starts at half
its size. Here softmax students start with the weights of attention's output projection times 1, 1/2, 1/4 and 0, and
nothing else changed; the gated mechanisms are trained for comparison. `tiny_cpu` for 150 steps, plain cross-entropy on
the text that ships with the package: about half a minute per student on two cores. Prints the table of docs/study.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from affine_attention.lab.report.statistics import Estimate, difference, estimate
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training import train
from affine_attention.lab.training.student import build_student
from affine_attention.recipes import recipe

FACTORS = (1.0, 0.5, 0.25, 0.0)
MECHANISMS = ("affine_no_bias", "affine", "head_gated", "gated")
EARLY = (50, 100)  # steps
LENGTH = {"teacher": None, "steps": 150, "decay_steps": 30, "save_every": 0, "probe_every": 0}


def scaled_softmax(out: Path, factor: float, seed: int) -> Path:
    """A softmax student whose attention starts weaker."""
    chosen = recipe("tiny_cpu", "softmax", LENGTH | {"seed": seed, "data_seed": seed})
    folder = out / f"start-{factor:g}-seed{seed}"
    if not folder.exists():
        student = build_student(chosen)
        with torch.no_grad():
            for layer in student.model.layers:
                layer.self_attn.o_proj.weight *= factor
        student.save_pretrained(folder)
    changed = {"student": str(folder), "student_changes": {}}
    return train(chosen.with_settings(changed), out / f"softmax-{factor:g}-seed{seed}", quiet=True, device="cpu")


def mechanism_run(out: Path, mechanism: str, seed: int) -> Path:
    chosen = recipe("tiny_cpu", mechanism, LENGTH | {"seed": seed, "data_seed": seed})
    return train(chosen, out / f"{mechanism}-seed{seed}", quiet=True, device="cpu")


def measures(folder: Path) -> tuple[float, float]:
    """(cross-entropy of steps 50 to 100, of held-out text at the end)."""
    log = RunFolder(folder).log()
    early = [line["ce_loss"] for line in log[EARLY[0] : EARLY[1]]]
    return sum(early) / len(early), log[-1]["eval_loss"]


def shown(found: Estimate | None) -> str:
    if found is None:
        return "–"
    return f"{found.mean:.3f}" + ("" if found.half_width is None else f" ± {found.half_width:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    results: dict[str, dict[int, tuple[float, float]]] = {}
    for seed in given.seeds:
        for factor in FACTORS:
            name = "softmax" if factor == 1 else f"softmax, output projection x {factor:g}"
            results.setdefault(name, {})[seed] = measures(scaled_softmax(given.out, factor, seed))
        for mechanism in MECHANISMS:
            results.setdefault(mechanism, {})[seed] = measures(mechanism_run(given.out, mechanism, seed))
        print(f"seed {seed} done", flush=True)
    print("| student | loss, steps 50 to 100 | held-out loss | difference to softmax |\n| :--- | ---: | ---: | ---: |")
    base = {seed: held for seed, (_, held) in results["softmax"].items()}
    for name, found in results.items():
        early, held = estimate([e for e, _ in found.values()]), estimate([h for _, h in found.values()])
        gap = "" if name == "softmax" else shown(difference({seed: h for seed, (_, h) in found.items()}, base))
        print(f"| {name} | {shown(early)} | {shown(held)} | {gap} |")
    held = {name: {seed: h for seed, (_, h) in found.items()} for name, found in results.items()}
    print(f"\naffine - affine_no_bias: {shown(difference(held['affine'], held['affine_no_bias']))}")


if __name__ == "__main__":
    main()
