"""Turns run folders into one self-contained HTML page: tables, figures and attention maps, with the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...files import write_text
from . import tables
from .claim_tables import claims_html
from .collect import Run, load_run, load_runs
from .first_tokens import first_token_table
from .gradient_windows import gradient_window_table
from .groups import Group, group_runs
from .instruments import instrument_tables
from .maps import packed_maps
from .markdown import write_markdown
from .page import escaped, figure_html, page, rich, table_html
from .plots import figures
from .runs import details_of_runs, made_table, missing_html, perplexity_table, runs_table
from .side_by_side import compare_runs
from .text import short, visible

__all__ = ["Run", "compare_runs", "load_run", "load_runs", "report"]

MOST_GROUPS = 10  # with more groups, charts initially hide some


def report(
    paths: Path | str | Iterable[Path | str],
    output: Path | str = "report.html",
    *,
    title: str | None = None,
    markdown: Path | str | None = None,
) -> Path:
    """Writes an HTML page about run folders and returns its path.

    Args:
        paths: run folders, also of unfinished runs and of runs without weights. Seeds of the same setting are
            averaged. Runs that cannot be read are listed on the page with the reason.
        output: the HTML file to write.
        title: heading of the page; None: the names of the recipes.
        markdown: a second file for the same tables: a new file, or one with the marks of markdown.py.
    """
    unreadable: dict[str, str] = {}
    runs = load_runs(paths, unreadable)
    if not runs:
        raise ValueError("paths must name at least one run folder, got none")
    output = Path(output)
    if output.is_dir():
        raise IsADirectoryError(f"output must be a file, got the folder {output}; write {output / 'report.html'}")
    written = render(runs, title, unreadable)
    if markdown is not None:  # first, because it raises for an existing file without the marks
        write_markdown(group_runs(runs), Path(markdown), unreadable)
    write_text(output, written)
    return output


def render(runs: list[Run], title: str | None = None, unreadable: dict[str, str] | None = None) -> str:
    """The HTML page of these runs; `unreadable` runs are listed with the reason."""
    groups = group_runs(runs)
    drawn = {figure["key"]: figure for figure in figures(groups)}
    maps, map_notes = packed_maps(groups)
    parts = {key: figure_html(figure) for key, figure in drawn.items()}
    parts |= {"figure-9": _explorer_html(bool(maps), map_notes)}
    for table in (
        runs_table(groups), made_table(groups), perplexity_table(groups), tables.delta_table(groups),
        tables.table_1(groups), tables.table_2(groups), tables.table_3(groups), tables.table_4(groups),
        tables.table_5(groups), gradient_window_table(groups), first_token_table(groups),
        *instrument_tables(groups),
    ):  # fmt: skip
        parts[table.key] = table_html(table)
    papers = "".join(table_html(tables.paper_table(f"table-{index}")) for index in (1, 2, 3, 4))
    sections = [
        ("overview", "At a glance", _join(parts, "forest", "deltas", "runs") + missing_html(groups, unreadable)),
        ("claims", "The paper’s claims", claims_html(groups)),
        ("quality", "Quality", _join(parts, "table-1", "table-2", "table-3", "perplexity", "robustness",
                                     "lengths")),
        ("training", "Training", _join(parts, "figure-7", "figure-10", "figure-8", "table-4",
                                       "gradient-windows", "table-5", "figure-2", "saturation", "speed")),
        ("attention", "Inside attention", _join(parts, "figure-3", "figure-4", "first-tokens", "activations",
                                                "figure-5", "figure-6", "alpha", "figure-11", "heads")),
        ("maps", "Attention maps", _join(parts, "figure-9")),
        ("made-of", "What was run", _join(parts, "made") + details_of_runs(groups)),
        ("paper", "The paper’s own numbers", _paper_lead(groups) + papers),
    ]  # fmt: skip
    heading = title or "Affine-Scaled Attention: " + ", ".join(dict.fromkeys(g.recipe_name for g in groups))
    hidden = _initially_hidden(groups)
    data: dict[str, Any] = {
        "groups": [_group_data(group, group in hidden) for group in groups],
        "figures": [figure for figure in drawn.values() if not figure.get("missing")],
        "maps": maps,
    }
    return page(short(heading), _lead(groups), sections, data)


def _initially_hidden(groups: list[Group]) -> list[Group]:
    """The groups that charts with many lines hide at first: variants, and recipes with fewer runs."""
    if len(groups) <= MOST_GROUPS:
        return []
    runs: dict[str, int] = {}
    for group in groups:
        runs[group.recipe_name] = runs.get(group.recipe_name, 0) + len(group.runs)
    main = max(runs, key=runs.__getitem__)
    hidden = [group for group in groups if group.variant or group.recipe_name != main]
    return hidden if len(hidden) < len(groups) else []


def _group_data(group: Group, hidden: bool) -> dict[str, Any]:
    return {
        "label": short(group.label),
        "light": group.colour[0],
        "dark": group.colour[1],
        "dash": group.dash,
        "seeds": len(group.runs),
        "aside": hidden,
    }


def _join(parts: dict[str, str], *keys: str) -> str:
    return "".join(parts[key] for key in keys)


def _lead(groups: list[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    finished = sum(run.finished for run in runs)
    mechanisms = len({group.mechanism_name for group in groups})
    words = (
        f"{len(runs)} run{'s' * (len(runs) != 1)} of {mechanisms} attention mechanism{'s' * (mechanisms != 1)}, "
        f"{'all' if finished == len(runs) else finished} finished. The tables and figures are those of the paper "
        "“Affine-Scaled Attention: Towards Flexible and Stable Transformer Attention” (arXiv 2602.23057), made from "
        "these runs."
    )
    return f'<p class="lead">{escaped(words)}</p>'


def _paper_lead(groups: list[Group]) -> str:
    same = sorted({visible(group.label) for group in groups if group.paper_size})
    words = (
        "Printed in arXiv 2602.23057: students of 0.5B, 1B and 3B parameters, distilled for 9,000 steps of "
        "1,024 × 2,048 tokens; no seeds and no intervals are given. "
    )
    words += (
        f"These runs have the same setting and are next to the paper’s rows in the tables above: {', '.join(same)}."
        if same
        else "No run here has that setting, so these numbers are for orientation and are not compared with ours."
    )
    return f'<p class="aid">{rich(short(words, 1000))}</p>'


def _explorer_html(has_maps: bool, notes: list[str]) -> str:
    caption = (
        "<h3>Figure 9: attention maps</h3><p class=\"aid\">Row: query token; column: key token; blue: positive weight, "
        "orange: negative weight. Hover over a cell, tap it, or use the arrow keys.</p>"
    )  # fmt: skip
    if not has_maps:
        return (
            f'<figure class="plot-figure empty" id="figure-9"><figcaption>{caption}'
            '<p class="missing">No run has maps; <code>affine inspect RUN</code> writes them.</p>'
            "</figcaption></figure>"
        )
    extra = "".join(f"<p>{rich(note)}</p>" for note in notes)
    return (
        f'<figure class="plot-figure explorer" id="figure-9" data-explorer><figcaption>{caption}</figcaption>'
        '<div class="plot"></div><noscript><p class="missing">The maps are drawn by JavaScript, which is switched off.'
        f'</p></noscript><div class="notes">{extra}</div></figure>'
    )
