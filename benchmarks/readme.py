"""Writes docs/numbers.md and the README's chart from the newest files in benchmarks/results/.

python -m benchmarks.readme          # rewrites the block between the two marks, and docs/images/speed.svg
"""

from __future__ import annotations

import re
from pathlib import Path

from .chart import Panel, draw
from .results_file import RESULTS, table

ROOT = Path(__file__).parent.parent
NUMBERS, CHART = ROOT / "docs" / "numbers.md", ROOT / "docs" / "images" / "speed.svg"
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
LOOP_SHOWN = ("host time", "train", "generate", "commit_running_alpha")
LOOP_VARIANTS = {"plain": "plain", "softmax": "softmax", "no mechanism": "softmax", "affine": "affine"}
SHOWN = ("affine", "affine_gated", "sink", "affine, compiled composition", "affine, the paper's formula")


def newest(what: str) -> Path | None:
    """The newest results file with a prefix; the dates in the names sort lexicographically."""
    found = sorted(RESULTS.glob(f"{what}*.md"))
    return found[-1] if found else None


def newest_of_each(pattern: str) -> list[Path]:
    """The newest of the results files with the same name before the date, newest first, then shortest name first.

    A long benchmark may be run in parts, each written to a file with a name of its own.
    """
    newest_file = {path.stem[:-10]: path for path in sorted(RESULTS.glob(f"{pattern}*.md"))}
    by_name = sorted(newest_file.values(), key=lambda path: len(path.stem))
    return sorted(by_name, key=lambda path: path.stem[-10:], reverse=True)


def rows_of(path: Path) -> list[list[str]]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def source(path: Path) -> str:
    found = re.search(r"Hardware: .*?\. Versions: .*?\. Date: [\d-]+\.", path.read_text())
    assert found, f"{path} does not say where it was measured"
    return f"{found.group(0)} File: [{path.name}](../benchmarks/results/{path.name})."


def attention_lines(*paths: Path | None) -> list[str]:
    """Ratios to the best plain backend, forward / forward + backward: one row per function, one column per shape.

    If several files contain a function, the first one is used.
    """
    shapes: list[str] = []
    ratios: dict[str, dict[str, str]] = {}
    for path in paths:
        shape, before = "", set(ratios)
        for row in rows_of(path)[1:] if path is not None else []:
            shape = row[0].split(":")[0] or shape
            shapes += [] if shape in shapes else [shape]
            if row[1] not in before:
                ratios.setdefault(row[1], {})[shape] = f"{row[4]} / {row[7]}" if row[4] else row[2]
    body = [[name, *(ratios[name].get(shape, "") for shape in shapes)] for name in SHOWN if name in ratios]
    return table(["", *shapes], body)


def loop_lines(*paths: Path) -> list[str]:
    """Plain, softmax and affine with the ratio of affine to plain, one row per measured quantity.

    If several files contain a quantity, the first one is used.
    """
    cells: dict[str, dict[str, str]] = {}
    for path in paths:
        before = set(cells)
        for what, variant, measured, unit, ratio, *_ in rows_of(path)[1:]:
            if what in before or not what.startswith(LOOP_SHOWN) or variant not in LOOP_VARIANTS:
                continue
            row = cells.setdefault(what, {})
            row[LOOP_VARIANTS[variant]] = f"{measured} {unit}" if measured[0].isdigit() else measured
            if variant == "affine":
                row["ratio"] = ratio
    columns = ("plain", "softmax", "affine", "ratio")
    in_order = sorted(cells, key=lambda what: next(n for n, start in enumerate(LOOP_SHOWN) if what.startswith(start)))
    body = [[what, *(cells[what].get(column, "") for column in columns)] for what in in_order]
    return table(["", "plain SDPA", "softmax", "affine", "affine over plain"], body)


# Results whose table is shown as it is: prefix of the file, heading, what it measures.
WHOLE = (
    ("ranges_nvidia", "Packed documents, windows and padding on a GPU", "Time of a call, bf16, relative to "
     "FlexAttention's plain softmax with the same mask; for padding, relative to cuDNN's plain causal attention."),
    ("mechanisms_nvidia", "Mechanisms on a GPU", "One layer's mechanism, forward + backward, bf16, causal, with the "
     "projections of the mechanism."),
    ("accelerate_nvidia", "A GPT-OSS layer on a GPU", "With its own sinks and window (`hf.accelerate`)."),
    ("serving_nvidia", "Continuous batching on a GPU", "transformers' `generate_batch`; plain is `paged|sdpa`."),
)  # fmt: skip


def whole_tables() -> list[str]:
    lines: list[str] = []
    for prefix, heading, what in WHOLE:
        path = newest(prefix)
        if path is not None:
            header, *rows = rows_of(path)
            lines += [f"## {heading}", "", what, "", *table(header, rows), "", source(path), ""]
    return lines


def memory_line(path: Path) -> str:
    """The ratio of the memory of affine to plain attention, smallest and largest of all shapes."""
    header, *rows = rows_of(path)
    ours = [row for row in rows if row[1] == "affine"]

    def span(column: str) -> str:
        ratios = [row[header.index(column) + 1] for row in ours]
        return f"{min(ratios)} to {max(ratios)}"

    return (
        f"Memory, affine over plain: {span('peak MiB')} at the peak of forward and backward, {span('kept MiB')} of "
        "what is held between them."
    )


def block() -> str:
    lines: list[str] = []
    gpu, cpu = newest("attention_nvidia"), newest("attention_cpu")
    rivals, decode = newest("attention-rivals_nvidia"), newest("decode")
    loop = newest_of_each("loop*_nvidia")
    if loop:
        lines += ["## Training and host time", "",
                  "Measured with the host's time included, next to plain SDPA in the same run: the host time of one "
                  "call (bf16, causal), and training, generation and `commit_running_alpha` of a transformers llama of "
                  "SmolLM2-135M's shape. A ratio above 1 is faster for tokens/s and slower for times.", "",
                  *loop_lines(*loop), "", " ".join(source(path) for path in loop), ""]  # fmt: skip
    if gpu is not None:
        lines += ["## Attention on a GPU", "", "Time of a causal call as a multiple of the best plain SDPA backend "
                  "(cuDNN) in the same run, bf16, forward / forward + backward, for the shapes of the paper's students "
                  "at 2,048 to 32,768 tokens.", "",
                  *attention_lines(gpu, rivals), "", f"{memory_line(gpu)} {source(gpu)}", ""]  # fmt: skip
    if gpu is not None and rivals is not None:
        lines[-2] += f" Rivals: [{rivals.name}](../benchmarks/results/{rivals.name})."
    lines += whole_tables()
    if decode is not None:
        shares = {kind: [float(row[4]) for row in rows_of(decode)[1:] if row[1] == kind]
                  for kind in ("affine", "affine, paged")}  # fmt: skip
        dense, paged = (f"{min(each):.0%} to {max(each):.0%}" for each in shares.values())
        lines += ["## Decoding", "",
                  f"Decoding reads a dense cache at {dense}, a paged one at {paged} of a measured device copy. "
                  f"{source(decode)}", ""]  # fmt: skip
    if cpu is not None:
        lines += ["## Attention on a CPU", "", "fp32, the same ratios.", "", *attention_lines(cpu), "", source(cpu), ""]
    lines += ["## Accuracy", "", "Error against fp64 over that of plain PyTorch in the same dtype, for outputs and all "
              "gradients (the limit is 2).", ""]  # fmt: skip
    for path in (newest("accuracy_cpu"), newest("accuracy_nvidia")):
        if path is not None:
            _, _, count, *quantiles = rows_of(path)[-1]
            p50, p99, most = quantiles
            lines += [f"- p50 {p50}, p99 {p99}, max {most} over {count} tensors. {source(path)}"]
    return "\n".join(lines).strip()


def chart() -> str:
    """The time of a training step, then that of an attention call, as multiples of plain SDPA in the same run."""
    loops, gpu = newest_of_each("loop*_nvidia"), newest("attention_nvidia")
    steps: dict[str, dict[str, float]] = {}
    for path in loops:
        for what, variant, _, unit, ratio, *_ in rows_of(path)[1:]:
            if what.startswith("train") and unit == "tokens/s" and variant in ("softmax", "affine"):
                steps.setdefault(what.removeprefix("train, "), {}).setdefault(variant, 1 / float(ratio))
    calls, shape = [], ""
    for row in rows_of(gpu)[1:] if gpu is not None else []:
        shape = row[0] or shape
        if row[1] == "affine":
            calls.append((shape, (float(row[4]), float(row[7]))))
    trained = [(f"{what} tokens", (found.get("softmax"), found.get("affine"))) for what, found in steps.items()]
    panels = [
        Panel("Training step, model of SmolLM2-135M's shape", ("softmax attached", "affine"), trained),
        Panel("Attention call, affine, causal, bf16", ("forward", "forward + backward"), calls),
    ]
    where = {re.sub(r" Date: .*", "", said) + f" {path.stem[-10:]}." for path in [*loops, *([gpu] if gpu else [])]
             for said in [source(path)]}  # fmt: skip
    return draw("Time relative to plain SDPA in the same run (1.00 = plain; lower is faster)", panels, sorted(where))


def rewritten(page: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{block()}\n{END}{after}"


def main() -> None:
    NUMBERS.write_text(rewritten(NUMBERS.read_text()))
    CHART.write_text(chart())
    print(f"{NUMBERS.relative_to(ROOT)} and {CHART.relative_to(ROOT)} rewritten")


if __name__ == "__main__":
    main()
