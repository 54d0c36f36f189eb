"""Reads tables, text and embedded data back out of a page, as a browser without scripts would."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[str]]] = {}
        self.kinds: dict[str, list[str]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._figure, self._cell, self._raw = "", False, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "figure":
            self._figure = given.get("id") or ""
        elif tag == "table":
            self.tables[self._figure], self.kinds[self._figure] = [], []
        elif tag == "tr":
            self.tables[self._figure].append([])
            self.kinds[self._figure].append(given.get("class") or "")
        elif tag in ("td", "th"):
            self.tables[self._figure][-1].append("")
            self._cell = True
        elif tag in ("script", "style"):
            self._raw = tag
            if tag == "script":
                self.scripts.append((given, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False
        elif tag in ("script", "style"):
            self._raw = ""

    def handle_data(self, data: str) -> None:
        if self._raw == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif not self._raw:
            self.text.append(data)
            if self._cell:
                self.tables[self._figure][-1][-1] += data


class Page:
    """What a page holds."""

    def __init__(self, source: str) -> None:
        self.source = source
        reader = _Reader()
        reader.feed(source)
        self.tables, self.kinds, self.tags, self.scripts = reader.tables, reader.kinds, reader.tags, reader.scripts
        self.text = re.sub(r"\s+", " ", "".join(reader.text))

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(next(text for given, text in self.scripts if given.get("id") == "report-data"))

    def figure(self, key: str) -> dict[str, Any]:
        return next(figure for figure in self.data["figures"] if figure["key"] == key)

    def cell(self, table: str, row: str, column: str) -> str:
        """The cell of the row that starts with a name, under a heading."""
        head, *body = self.tables[table]
        found = [cells for cells in body if cells[0] == row]
        assert len(found) == 1, f"{len(found)} rows {row!r} in {table}: {[cells[0] for cells in body]}"
        return found[0][head.index(column)]


def plain(text: str) -> float:
    """The number that a cell starts with."""
    found = re.match(r"[+−-]?[\d,]*\.?\d+", text)
    assert found, text
    return float(found.group(0).replace("−", "-").replace(",", ""))
