"""Renders tables, figures and maps as one self-contained HTML page without network requests."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from ...version import __version__
from ..machine import now
from .cells import Cell, Table
from .text import embedded_json, escaped, short

SCRIPTS = ("chart.js", "lines.js", "grids.js", "explorer.js", "page.js")
STYLES = ("page.css",)


def page(title: str, lead: str, sections: list[tuple[str, str, str]], data: dict[str, Any]) -> str:
    """The whole document. Sections are (key, title, HTML); data is embedded as JSON that is never executed."""
    style, script = _asset(STYLES), _asset(SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    links = "".join(f'<li><a href="#{key}">{escaped(name)}</a></li>' for key, name, _ in sections)
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title">'
        f'<h2 id="{key}-title">{escaped(name)}</h2>{content}</section>'
        for key, name, content in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escaped(title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header class="top"><h1>{escaped(title)}</h1>{lead}</header>
<nav class="contents" aria-label="Contents"><ul>{links}</ul></nav>
<main id="content">{body}</main>
<footer>Made by <code>affine report</code> of affine_attention {__version__} on {now()[:10]}. This page contains all of
its data and makes no network requests.</footer>
<script type="application/json" id="report-data">{embedded_json(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def table_html(table: Table) -> str:
    """An HTML table in a scrollable box; the script adds buttons to copy and save it."""
    if not table.rows:
        return (
            f'<figure class="table empty" id="{table.key}"><figcaption><h3>{escaped(table.title)}</h3>'
            f'<p class="missing">{rich(table.missing)}</p></figcaption></figure>'
        )
    heads = "".join(_head(column, table, cell) for column, cell in zip(table.columns, table.rows[0].cells, strict=True))
    rows = "".join(
        f"<tr{_class(row.kind)}>{''.join(_cell(cell, index) for index, cell in enumerate(row.cells))}</tr>"
        for row in table.rows
    )
    notes = "".join(f"<p>{rich(note)}</p>" for note in table.notes)
    return (
        f'<figure class="table" id="{table.key}"><figcaption><h3>{escaped(table.title)}</h3>'
        f'<p class="aid">{rich(table.caption)}</p></figcaption>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(table.title)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        f'{f"""<div class="notes">{notes}</div>""" if notes else ""}</figure>'
    )


def figure_html(figure: dict[str, Any]) -> str:
    """The frame of a figure; the script draws into it."""
    caption = f'<h3>{escaped(figure["title"])}</h3><p class="aid">{rich(figure["aid"])}</p>'
    if figure.get("missing"):
        return (
            f'<figure class="plot-figure empty" id="{figure["key"]}"><figcaption>{caption}'
            f'<p class="missing">{rich(figure["missing"])}</p></figcaption></figure>'
        )
    return (
        f'<figure class="plot-figure" id="{figure["key"]}" data-figure="{figure["key"]}">'
        f"<figcaption>{caption}</figcaption>"
        '<div class="plot"></div><noscript><p class="missing">This figure is drawn by JavaScript, which is switched '
        "off. The numbers are in the tables.</p></noscript></figure>"
    )


def details_html(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def settings_html(values: dict[str, str]) -> str:
    """A definition list of names and values."""
    items = "".join(f"<dt>{escaped(key)}</dt><dd>{escaped(value)}</dd>" for key, value in values.items())
    return f'<dl class="settings">{items}</dl>'


def list_html(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def rich(text: str) -> str:
    """Escaped text with `commands` in code formatting."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped(text))


def _head(column: str, table: Table, below: Cell) -> str:
    kind = _class("" if below.numeric else "text")
    return f'<th scope="col"{kind}{_title(table.column_titles.get(column, ""))}>{escaped(short(column, 40))}</th>'


def _cell(cell: Cell, index: int) -> str:
    text = escaped(short(cell.text)) if len(cell.text) > 120 else escaped(cell.text)
    title = cell.text if len(cell.text) > 120 else cell.title
    kinds = ("" if cell.numeric else "text", "long" if len(cell.text) > 36 else "", cell.kind)
    classes = " ".join(kind for kind in kinds if kind)
    detail = f' <span class="detail">{escaped(cell.detail)}</span>' if cell.detail else ""
    inner = f"<b>{text}</b>{detail}" if cell.kind == "best" else f"{text}{detail}"
    if index == 0:
        return f'<th scope="row"{_class(classes)}{_title(title)}>{inner}</th>'
    return f"<td{_class(classes)}{_title(title)}>{inner}</td>"


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def _title(text: str) -> str:
    return f' title="{escaped(text)}"' if text else ""


def _asset(names: tuple[str, ...]) -> str:
    return "\n".join((files(__package__) / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
