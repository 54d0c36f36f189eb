"""Writes benchmarks/results/<what>_<device>_<date>.md with hardware, versions, date and command."""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def device_name(device: str) -> str:
    """The name of the GPU, or the name of the CPU with the number of threads of torch."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    name = found.group(1).strip() if found else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def header(device: str) -> list[str]:
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if device == "cuda":
        import triton

        versions += [f"triton {triton.__version__}", f"cuDNN {torch.backends.cudnn.version()}"]
    command = " ".join(["python", "-m", _module_name(), *sys.argv[1:]])
    return [
        f"Hardware: {device_name(device)}. Versions: {', '.join(versions)}. "
        f"Date: {datetime.date.today().isoformat()}. Command: `{command}`.",
        "",
    ]


def write(what: str, device: str, title: str, lines: list[str], echo: bool = True) -> Path:
    """Writes the result, prints it if `echo` is True, and returns the path."""
    text = "\n".join([f"# {title}", "", *header(device), *lines]) + "\n"
    kind = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-") if device == "cuda" else "cpu"
    path = results_folder() / f"{what}_{kind}_{datetime.date.today().isoformat()}.md"
    path.write_text(text)
    if echo:
        print(text)
        print(f"written to {path}")
    return path


def results_folder() -> Path:
    """benchmarks/results or the folder in AFFINE_RESULTS; created if it does not exist."""
    folder = Path(os.environ.get("AFFINE_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name
