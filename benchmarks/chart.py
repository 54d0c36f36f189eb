"""Draws the README's chart as an SVG: what a training step costs, then what an attention call costs, over plain SDPA.

`python -m benchmarks.readme` writes it from the newest files in benchmarks/results/. The SVG is plain text without
scripts, and equal results give an equal file, which a test compares.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

WIDTH, LABEL, RIGHT = 860, 270, 20  # of the chart, of the labels on its left, and of its right margin
ROW, GAP, HEAD = 20, 12, 48  # heights of a bar, of the space between groups, and of a panel's heading
COLOURS = ("#64748b", "#2563eb")
TOP = 1.2  # of the axis, in multiples of plain SDPA


@dataclass
class Panel:
    """Bars in groups: each group has a name and one value for each series; None leaves a bar out."""

    title: str
    series: tuple[str, ...]
    groups: list[tuple[str, tuple[float | None, ...]]]

    @property
    def height(self) -> int:
        bars = sum(value is not None for _, values in self.groups for value in values)
        return HEAD + bars * ROW + len(self.groups) * GAP


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", colour: str = "#1f2937") -> str:
    weight = ' font-weight="600"' if size > 13 else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{html.escape(words)}</text>"
    )


def at(ratio: float) -> float:
    ratio = min(ratio, TOP)  # a longer bar ends at the margin; its number is right
    return round(LABEL + ratio / TOP * (WIDTH - LABEL - RIGHT), 1)


def draw_panel(panel: Panel, top: int) -> list[str]:
    lines = [text(12, top + 22, panel.title, 14)]
    right = WIDTH - 12
    for index in reversed(range(len(panel.series))):
        lines.append(text(right, top + 22, panel.series[index], 12, "end"))
        right -= round(7 * len(panel.series[index])) + 18
        lines.append(f'<rect x="{right}" y="{top + 12}" width="11" height="11" fill="{COLOURS[index]}"/>')
        right -= 14
    y = top + HEAD - 8
    for name, values in panel.groups:
        bars = [(value, COLOURS[index]) for index, value in enumerate(values) if value is not None]
        lines.append(text(LABEL - 10, y + len(bars) * ROW / 2 + 4, name, 12, "end"))
        for value, colour in bars:
            width = round(at(value) - LABEL, 1)
            lines.append(f'<rect x="{LABEL}" y="{y + 2}" width="{width}" height="{ROW - 4}" fill="{colour}"/>')
            lines.append(text(LABEL + 8, y + 14, f"{value:.2f}", colour="#ffffff"))
            y += ROW
        y += GAP
    lines.append(
        f'<line x1="{at(1)}" x2="{at(1)}" y1="{top + HEAD - 12}" y2="{y - GAP + 4}" stroke="#111827" '
        'stroke-dasharray="4 3"/>'
    )
    return lines


def draw(title: str, panels: list[Panel], notes: list[str]) -> str:
    """The whole chart; bars start at 0, the dashed line is plain SDPA."""
    height = 40 + sum(panel.height for panel in panels) + 18 * len(notes) + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(12, 26, title, 15),
    ]
    top = 34
    for panel in panels:
        lines += draw_panel(panel, top)
        top += panel.height
    for index, note in enumerate(notes):
        lines.append(text(12, top + 14 + 18 * index, note, 11, colour="#4b5563"))
    return "\n".join([*lines, "</svg>"]) + "\n"
