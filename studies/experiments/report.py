"""Prints the tests of a design and its tables from the runs of run.py, with the names of the runs that are missing.

    python -m studies.experiments.report e1 runs/e1
    python -m studies.experiments.report e2 e2-seed0.tar.xz e2-seed1.tar.xz

RUNS are folders of runs and archives of run.py. e1 also reads the stored runs of the study. E3 and the CPU versions of
E1 and E4 have stored results: `e3_report`, `e1_cpu --report` and `e4_cpu --report`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .design_runs import run_folders
from .e1_report import report_e1
from .e2_report import report_e2
from .e4_report import report_e4
from .e5_report import report_e5

REPORTS = {"e1": report_e1, "e2": report_e2, "e4": report_e4, "e5": report_e5}


def report(experiment: str, places: Sequence[Path]) -> str:
    """The report of an experiment as Markdown."""
    with run_folders(places) as folders:
        blocks = REPORTS[experiment](folders)
    return "\n\n".join("\n".join(block) for block in blocks if block)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=list(REPORTS))
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUNS")
    given = parser.parse_args(arguments)
    print(report(given.experiment, given.runs))


if __name__ == "__main__":
    main()
