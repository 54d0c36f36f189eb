"""Turns run folders into one self-contained page: tables, figures and maps, beside the paper's own numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...files import write_text
from . import tables
from .claim_tables import claims_html
from .collect import Run, load_run, load_runs
from .groups import Group, group_runs
from .maps import packed_maps
from .markdown import write_markdown
from .page import escaped, figure_html, page, rich, table_html
from .plots import figures
from .runs import details_of_runs, made_table, missing_html, perplexity_table, runs_table
from .text import short, visible

__all__ = ["Run", "load_run", "load_runs", "report"]

CROWD = 10  # groups that one chart can show


def report(
    paths: Path | str | Iterable[Path | str],
    output: Path | str = "report.html",
    *,
    title: str | None = None,
    markdown: Path | str | None = None,
) -> Path:
    """Writes one HTML page about run folders and returns its path.

    Args:
        paths: run folders; unfinished ones too, and those whose weights were not kept. Seeds of one setting are found
            and averaged. One that cannot be read is named on the page, with the reason; the others are shown.
        output: the file to write.
        title: heading of the page; None: the recipes' names.
        markdown: a second file for the same tables: a new one, or one with the marks of markdown.py.
    """
    unreadable: dict[str, str] = {}
    runs = load_runs(paths, unreadable)
    if not runs:
        raise ValueError("paths must name at least one run folder, got none")
    output = Path(output)
    if output.is_dir():
        raise IsADirectoryError(f"output must be a file, got the folder {output}; write {output / 'report.html'}")
    written = render(runs, title, unreadable)
    if markdown is not None:  # first, since it may refuse a file with words of its own
        write_markdown(group_runs(runs), Path(markdown), unreadable)
    write_text(output, written)
    return output


def render(runs: list[Run], title: str | None = None, unreadable: dict[str, str] | None = None) -> str:
    """The page of these runs as text; `unreadable` ones are named with the reason."""
    groups = group_runs(runs)
    drawn = {figure["key"]: figure for figure in figures(groups)}
    maps, map_notes = packed_maps(groups)
    parts = {key: figure_html(figure) for key, figure in drawn.items()}
    parts |= {"figure-9": _explorer_html(bool(maps), map_notes)}
    for table in (
        runs_table(groups), made_table(groups), perplexity_table(groups), tables.delta_table(groups),
        tables.table_1(groups), tables.table_2(groups), tables.table_3(groups), tables.table_4(groups),
        tables.table_5(groups),
    ):  # fmt: skip
        parts[table.key] = table_html(table)
    papers = "".join(table_html(tables.paper_table(f"table-{index}")) for index in (1, 2, 3, 4))
    sections = [
        ("overview", "At a glance", _join(parts, "forest", "deltas", "runs") + missing_html(groups, unreadable)),
        ("claims", "The paper’s claims", claims_html(groups)),
        ("quality", "Quality", _join(parts, "table-1", "table-2", "table-3", "perplexity")),
        ("training", "Training", _join(parts, "figure-7", "figure-10", "figure-8", "table-4", "table-5", "figure-2",
                                       "saturation", "speed")),
        ("attention", "Inside attention", _join(parts, "figure-3", "figure-4", "figure-5", "figure-6", "alpha",
                                                "figure-11", "heads")),
        ("maps", "Attention maps", _join(parts, "figure-9")),
        ("made-of", "What was run", _join(parts, "made") + details_of_runs(groups)),
        ("paper", "The paper’s own numbers", _paper_lead(groups) + papers),
    ]  # fmt: skip
    heading = title or "Affine-Scaled Attention: " + ", ".join(dict.fromkeys(g.recipe_name for g in groups))
    aside = _aside(groups)
    data: dict[str, Any] = {
        "groups": [_group_data(group, group in aside) for group in groups],
        "figures": [figure for figure in drawn.values() if not figure.get("missing")],
        "maps": maps,
    }
    return page(short(heading), _lead(groups), sections, data)


def _aside(groups: list[Group]) -> list[Group]:
    """Where many lines would hide each other: variants and the recipes of fewer runs, which wait in the legend."""
    if len(groups) <= CROWD:
        return []
    runs: dict[str, int] = {}
    for group in groups:
        runs[group.recipe_name] = runs.get(group.recipe_name, 0) + len(group.runs)
    main = max(runs, key=runs.__getitem__)
    aside = [group for group in groups if group.variant or group.recipe_name != main]
    return aside if len(aside) < len(groups) else []


def _group_data(group: Group, aside: bool) -> dict[str, Any]:
    return {
        "label": short(group.label),
        "light": group.colour[0],
        "dark": group.colour[1],
        "dash": group.dash,
        "seeds": len(group.runs),
        "aside": aside,
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
        f"These runs have the same setting and stand beside the paper’s rows in the tables above: {', '.join(same)}."
        if same
        else "No run here has that setting, so these numbers are for orientation and are not compared with ours."
    )
    return f'<p class="aid">{rich(short(words, 1000))}</p>'


def _explorer_html(has_maps: bool, notes: list[str]) -> str:
    caption = (
        "<h3>Figure 9: attention maps</h3><p class=\"aid\">Row: the token that reads; column: the token that is read; "
        "blue adds, orange subtracts, no colour is zero. Point at a cell, tap it, or walk with the arrow keys.</p>"
    )  # fmt: skip
    if not has_maps:
        return (
            f'<figure class="plot-figure empty" id="figure-9"><figcaption>{caption}'
            '<p class="missing">No run holds maps; <code>affine inspect RUN</code> writes them.</p>'
            "</figcaption></figure>"
        )
    extra = "".join(f"<p>{rich(note)}</p>" for note in notes)
    return (
        f'<figure class="plot-figure explorer" id="figure-9" data-explorer><figcaption>{caption}</figcaption>'
        '<div class="plot"></div><noscript><p class="missing">The maps are drawn by the page&#39;s own script, '
        f'which is switched off.</p></noscript><div class="notes">{extra}</div></figure>'
    )
