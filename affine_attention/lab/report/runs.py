"""Tables about the runs themselves: status, missing results, hardware, versions and settings."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from .cells import Cell, Row, Table, shown, text_cell
from .collect import Run, last_number, number
from .groups import Group, omitted_settings
from .measures import parameters, perplexity, speed
from .page import details_html, escaped, list_html, rich, settings_html
from .text import short

MOST_SETTINGS = 500  # shown for one run


def runs_table(groups: list[Group]) -> Table:
    rows = []
    for group in groups:
        for run in group.runs:
            rows.append(
                Row([
                    text_cell(run.name, str(run.folder.path)),
                    text_cell(group.recipe_name),
                    text_cell(group.method),
                    Cell(run.seed_label),
                    Cell(f"{run.steps:,}" + (f" / {run.planned_steps:,}" if run.planned_steps else "")),
                    Cell(_amount(run.tokens)),
                    Cell(_epochs(run)),
                    Cell(_amount(parameters(run))),
                    Cell(_amount(speed(run))),
                    Cell(_duration(last_number(run.log, "seconds"))),
                    Cell(run.status, kind="" if run.finished else "worse", numeric=False),
                    Cell(_stages(run), numeric=False),
                ])
            )  # fmt: skip
    columns = ["Run", "Recipe", "Mechanism", "Seed", "Steps", "Tokens", "Epochs", "Parameters", "Tokens/s", "Time",
               "Status", "Measured"]  # fmt: skip
    titles = {"Tokens/s": "median over steps", "Time": "training time", "Epochs": "passes over the training data"}
    notes = [note] if (note := omitted_settings(groups)) else []
    return Table("runs", "The runs", "All run folders of this report.", columns, rows, notes, titles, "No runs.")


def perplexity_table(groups: list[Group]) -> Table:
    """Perplexity per token, word and byte of each run, with the size of the text."""
    rows = []
    for group in groups:
        for run in group.runs:
            table = run.evaluation.get("perplexity")
            for name, entry in table.items() if isinstance(table, dict) else ():
                if not isinstance(entry, dict):
                    continue
                forms = [Cell(shown(perplexity(run, name, form), digits)) for form, digits in
                         (("token", 3), ("word", 3), ("byte", 4), ("bits_per_byte", 4), ("stderr", 4))]  # fmt: skip
                sizes = [Cell(_whole(number(entry.get(key)))) for key in ("tokens", "words", "documents")]
                rows.append(Row([text_cell(group.label), Cell(run.seed_label), text_cell(name), *forms, *sizes]))
    columns = ["Mechanism", "Seed", "Text", "Token", "Word", "Byte", "Bits/byte", "Std. error", "Tokens", "Words",
               "Documents"]  # fmt: skip
    return Table(
        "perplexity",
        "Perplexity per token, word and byte",
        "Only numbers of the same unit and the same text are comparable.",
        columns,
        rows,
        [],
        {"Std. error": "of the mean loss per token in nats, over documents"},
        "No run was evaluated on held-out text; `affine evaluate RUN` measures it.",
    )


def made_table(groups: list[Group]) -> Table:
    """Hardware, versions and data of the runs; runs with the same entries share a row."""
    together: dict[tuple[str, ...], list[Run]] = {}
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        made = run.manifest
        facts: list[Any] = [made.get("device")]
        facts += [_find(made.get("versions"), package) for package in ("torch", "affine_attention")]
        facts += [made.get("commit"), _find(made.get("data"), "fingerprint"), _implementation(made)]
        facts.append(str(made.get("date") or "")[:10])
        together.setdefault(tuple(short(fact or "–", 300) for fact in facts), []).append(run)
    rows = []
    for shared, same in together.items():
        names = f"all {len(runs)} runs" if len(same) == len(runs) > 1 else ", ".join(run.name for run in same)
        fingerprint = text_cell(shared[4][:12], shared[4])
        rows.append(Row([text_cell(names), *map(text_cell, shared[:4]), fingerprint, *map(text_cell, shared[5:])]))
    columns = ["Run", "Device", "torch", "affine_attention", "Commit", "Data", "Attention implementation", "Date"]
    return Table("made", "Hardware, versions and data", "What is needed to reproduce these runs.", columns, rows, [],
                 {"Data": "fingerprint of the training data"}, "No runs.")  # fmt: skip


def details_of_runs(groups: list[Group]) -> str:
    """All settings and facts of each run, collapsed."""
    parts = []
    for group in groups:
        for run in group.runs:
            content = ""
            for name, values in (("Recipe", run.recipe), ("Manifest", run.manifest),
                                 ("Evaluation made by", run.evaluation.get("made")),
                                 ("Inspection made by", run.inspection.get("made"))):  # fmt: skip
                if isinstance(values, dict) and values:
                    content += f"<h4>{escaped(name)}</h4>{settings_html(flat(values))}"
            events = [e for e in run.events if e.get("event") not in ("save", None)]
            if events:
                content += "<h4>Events</h4>" + list_html(escaped(short(_event(e), 300)) for e in events[-20:])
            which = escaped(f"{short(group.label)}, seed {short(run.seed_label, 40)}")
            summary = f'{escaped(short(run.name))} <span class="detail">{which}</span>'
            parts.append(details_html(summary, content))
    return "".join(parts)


def missing_html(groups: list[Group], unreadable: dict[str, str] | None = None) -> str:
    """What is missing and which command creates it, and what could not be read."""
    items = [
        f"<b>{escaped(short(path))}</b>: unreadable: {escaped(short(reason, 400))}"
        for path, reason in (unreadable or {}).items()
    ]
    for group in groups:
        for run in group.runs:
            path = shlex.quote(str(run.folder.path))
            problems = []
            if not run.finished:
                problems.append(f"{run.status}; {_resume_hint(run)}")
            if not run.evaluation:
                problems.append(f"not evaluated; `affine evaluate {path}`")
            if not run.inspection:
                problems.append(f"not inspected; `affine inspect {path}`")
            if not run.manifest:
                problems.append("no manifest.json, so hardware and versions are unknown")
            for problem in [*problems, *run.problems]:
                items.append(f"<b>{escaped(short(run.name))}</b>: {rich(short(problem, 400))}")
    for recipe in dict.fromkeys(group.recipe_name for group in groups):
        runs = [run for group in groups if group.recipe_name == recipe for run in group.runs]
        prints = {str(found) for run in runs if (found := _find(run.manifest.get("data"), "fingerprint"))}
        if len(prints) > 1:
            words = f"its runs were trained on {len(prints)} different data sets, so they are not comparable"
            items.append(f"<b>{escaped(short(recipe))}</b>: {escaped(words)}")
    if not items:
        return '<p class="aid">Nothing is missing: every run is finished, evaluated and inspected.</p>'
    return f'<div class="todo"><h3>What is missing</h3>{list_html(items)}</div>'


def flat(values: dict[str, Any], before: str = "") -> dict[str, str]:
    """A nested table as `outer.inner: value`."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if len(found) >= MOST_SETTINGS:
            found["…"] = f"{len(values):,} settings; the first {MOST_SETTINGS} are shown"
            break
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            found |= flat(value, f"{name}.")
        else:
            found[short(name, 80)] = short(value if isinstance(value, str) else json.dumps(value, default=str), 400)
    return found


def _resume_hint(run: Run) -> str:
    command = run.manifest.get("command")
    if isinstance(command, str) and command:
        command = command.replace("__main__.py", "python -m affine_attention", 1)
        return f"`{short(command, 300)}` resumes from its newest checkpoint"
    return "`affine train` with the same settings and folder resumes from its newest checkpoint"


def _event(event: dict[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in ("time", "event")}
    return f"{event.get('time', '')} {event.get('event')}" + "".join(f", {key} {value}" for key, value in rest.items())


def _stages(run: Run) -> str:
    done = [word for word, there in (("evaluated", run.evaluation), ("inspected", run.inspection)) if there]
    return ", ".join(done) or "–"


def _epochs(run: Run) -> str:
    tokens = number(_find(run.manifest, "train_tokens"))
    return shown(run.tokens / tokens, 2) if tokens > 0 else "–"


def _implementation(manifest: dict[str, Any]) -> str:
    found = manifest.get("attention") or manifest.get("implementation")
    if isinstance(found, dict):
        name, why = str(found.get("implementation") or ""), str(found.get("why") or "")
        return why if why.startswith(name) else f"{name}: {why}"
    return str(found or "")


def _find(values: Any, name: str) -> Any:
    """The first entry with that name, at any depth."""
    if not isinstance(values, dict):
        return None
    if name in values:
        return values[name]
    return next((found for inner in values.values() if (found := _find(inner, name)) is not None), None)


def _amount(value: float) -> str:
    """1234567 as 1.23M."""
    if math.isnan(value):
        return "–"
    for size, word in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{word}" if abs(value) / size < 999.5 else f"{value / size:.0f}{word}"
    return f"{value:.3g}"


def _whole(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
