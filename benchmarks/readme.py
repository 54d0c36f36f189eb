"""Writes the README's numbers from the newest files in benchmarks/results/.

python -m benchmarks.readme          # rewrites the block between the two marks
"""

from __future__ import annotations

import re
from pathlib import Path

from .results_file import RESULTS, table

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
SHOWN = ("affine", "affine_gated", "sink", "affine, compiled composition", "affine, the paper's formula")


def newest(what: str) -> Path | None:
    """The latest result of a kind; dates sort as names."""
    found = sorted(RESULTS.glob(f"{what}*.md"))
    return found[-1] if found else None


def rows_of(path: Path) -> list[list[str]]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def source(path: Path) -> str:
    found = re.search(r"Hardware: .*?\. Versions: .*?\. Date: [\d-]+\.", path.read_text())
    assert found, f"{path} does not say where it was measured"
    return f"{found.group(0)} File: [{path.name}](benchmarks/results/{path.name})."


def attention_lines(path: Path) -> list[str]:
    """Ratios to the best plain backend, forward / forward + backward, one row a function and one column a shape."""
    _, *rows = rows_of(path)
    shapes: list[str] = []
    ratios: dict[str, dict[str, str]] = {}
    for row in rows:
        if row[0]:
            shapes.append(row[0].split(":")[0])
        ratios.setdefault(row[1], {})[shapes[-1]] = f"{row[4]} / {row[7]}"
    body = [[name, *(ratios[name].get(shape, "") for shape in shapes)] for name in SHOWN if name in ratios]
    return table(["", *shapes], body)


def block() -> str:
    lines: list[str] = []
    gpu, cpu = newest("attention_nvidia"), newest("attention_cpu")
    decode, accuracy = newest("decode"), newest("accuracy_cpu")
    if gpu is not None:
        lines += ["Time of a causal call as a multiple of the best plain SDPA backend (cuDNN) in the same run, bf16, "
                  "forward / forward + backward, for the shapes of the paper's students at 2,048 and 8,192 tokens:", "",
                  *attention_lines(gpu), "", source(gpu), ""]  # fmt: skip
    if decode is not None:
        dense = [float(row[4]) for row in rows_of(decode)[1:] if row[1] == "affine"]
        lines += [f"Decoding reads a dense cache at {min(dense):.0%} to {max(dense):.0%} of a measured device copy. "
                  f"{source(decode)}", ""]  # fmt: skip
    if cpu is not None:
        lines += ["On a CPU, fp32:", "", *attention_lines(cpu), "", source(cpu), ""]
    if accuracy is not None:
        last = rows_of(accuracy)[-1]
        lines += [f"Accuracy: error against fp64 over that of plain PyTorch in the same dtype, for outputs and all "
                  f"gradients: p50 {last[3]}, p99 {last[4]}, max {last[5]} over {last[2]} tensors (the bar is 2). "
                  f"{source(accuracy)}"]  # fmt: skip
    return "\n".join(lines).strip()


def rewritten(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{block()}\n{END}{after}"


def main() -> None:
    README.write_text(rewritten(README.read_text()))
    print(f"numbers of {README.name} rewritten")


if __name__ == "__main__":
    main()
