"""The tables of the section "The paper's claims"."""

from __future__ import annotations

from .cells import Cell, Row, Table, estimate_cell, text_cell
from .claims import Claim, claims
from .factorials import factorials
from .gradient_windows import AFTER_WARMUP, clipped_measure, largest_measure, std_measure
from .groups import Group
from .measures import counted
from .page import details_html, escaped, table_html
from .power import power_table
from .questions import Swept, questions, rates, signs, swept, swept_keys, value_text
from .text import short
from .verdicts import FAILS, HOLDS, LOWERED, OPEN, RAISED, RULE, ZERO, Comparison, digits_for, tally

ONE_SEED = (
    "There is only one seed, so these differences may be due to chance and no verdict is given: another seed can "
    "reverse them. `affine study --seeds 0,1,2` runs the seeds that a verdict needs; two seeds are the minimum, and "
    "three make the interval about three times narrower than two."
)


def claim_tables(groups: list[Group]) -> list[Table]:
    """The summary, then one table for each claim and question that has differences."""
    found, asked, crossed = claims(groups), questions(groups), factorials(groups)
    several = _any_interval([*found, *asked])
    tables = [_summary(found, several)]
    tables += [power_table(groups)] if several else []
    tables += [_claim_table(claim, several) for claim in found if claim.compared]
    tables += [_claim_table(claim, several) for claim in crossed if several and _any_interval([claim])]
    tables += [_claim_table(claim, several) for claim in asked if claim.compared]
    for key in swept_keys(groups):
        tables.append(_sweep_table(swept(groups, key)))
    if at_rates := rates(groups):
        tables.append(_stability_table(at_rates))
    return tables


def claims_html(groups: list[Group]) -> str:
    """The section of the page; the single tables are collapsed if there are no intervals."""
    summary, *others = claim_tables(groups)
    content = "".join(table_html(table) for table in others)
    if others and "Verdict" not in summary.columns:
        content = details_html(escaped("Every difference behind this table"), content)
    return table_html(summary) + content


def _summary(found: list[Claim], several: bool) -> Table:
    """One row per claim and setting: the verdict of its tests, and the main comparison."""
    found = [claim for claim in found if claim.key != "claim-controls"]  # several separate questions
    columns = ["Claim", "Verdict" if several else "Claimed", "Difference", "Comparison", "Measure", "Seeds"]
    columns += ["Tests"] if several else []
    rows, absent = [], {}
    for claim in found:
        if not claim.compared:
            absent[claim.title] = claim.absent
        if not several and not claim.compared:
            continue
        for setting in dict.fromkeys(each.setting for each in claim.compared or claim.comparisons[:1]):
            mine = [each for each in claim.comparisons if each.setting == setting]
            head = mine[0] if several else next(each for each in mine if each.delta)
            difference, seeds = _numbers(head)
            cells = [Cell(claim.title, setting, f"{claim.sentence} ({claim.where})", numeric=False)]
            cells += [_family_cell(claim, setting, head) if several else _claimed_cell(head)]
            cells += [difference, text_cell(head.name), text_cell(head.measure.label, head.measure.title), seeds]
            cells += [text_cell(tally(each for each in mine if each.delta) or "–")] if several else []
            rows.append(Row(cells))
    notes = [RULE] if several else [ONE_SEED]
    notes += [f"No runs to compare for: {_listed(absent)}."] if absent else []
    return Table(
        "verdicts",
        "The paper’s claims and the results of these runs",
        "The verdict of each claim from its family of tests, and the main comparison; all are in the tables below."
        if several
        else "The main difference for each claim; all differences are below.",
        columns,
        rows,
        notes,
        {"Tests": "verdicts of the tests that have runs"},
        "No claim can be tested: this needs runs of affine and softmax with the same recipe and settings. "
        "`affine study` makes them.",
    )


def _claim_table(claim: Claim, several: bool) -> Table:
    settings = any(each.setting for each in claim.comparisons)
    columns = ["Comparison", "Measure", "Verdict" if several else "Claimed", "Difference"]
    columns += ["Own interval", "Error term", "p (Holm)"] if several else []
    columns += [*(["Setting"] if settings else []), "Seeds"]
    rows = []
    for each in claim.compared:
        difference, seeds = _numbers(each)
        cells = [text_cell(each.name), text_cell(each.measure.label, each.measure.title)]
        cells += [_verdict_cell(each) if several else _claimed_cell(each), difference]
        cells += [_own_cell(each), _error_cell(each), _p_cell(each)] if several else []
        cells += [*([text_cell(each.setting)] if settings else []), seeds]
        rows.append(Row(cells))
    notes = list(dict.fromkeys(claim.notes))
    for setting in dict.fromkeys(each.setting for each in claim.comparisons):
        mine = [each for each in claim.comparisons if each.setting == setting]
        place = f" ({setting})" if setting else ""
        if names := dict.fromkeys(name for each in mine for name in each.absent):
            notes.append(f"No run at the same settings{place}: {', '.join(short(name, 60) for name in names)}.")
        unread: dict[tuple[str, str], list[str]] = {}
        for each in mine:
            if not each.delta and not each.absent:
                unread.setdefault((each.name, each.reason), []).append(each.measure.label)
        reasons = [
            f"{name}{f', {labels[0]}' if len(labels) == 1 else ''} ({reason})"
            for (name, reason), labels in unread.items()
        ]
        if reasons:
            notes.append(f"No difference{place}: {'; '.join(short(name) for name in reasons)}.")
    titles = {
        "Difference": "with the error term that the verdict uses",
        "Own interval": "from the values of this row's runs alone, per seed",
        "Error term": "pooled: residuals of all mechanisms of the setting; own: of this row's runs; degrees of freedom",
        "p (Holm)": "corrected for all tests of this claim in the setting; without a verdict: p as it is",
    }
    return Table(claim.key, claim.title, f"{claim.sentence} ({claim.where})", columns, rows, notes, titles)


def _sweep_table(found: list[Swept]) -> Table:
    """The measure of each mechanism at each value of a setting, and the best value."""
    values = list(dict.fromkeys(value for each in found for value in each.groups))
    values.sort(key=lambda value: (isinstance(value, str), value))
    settings = any(each.setting for each in found)
    rows = []
    for each in found:
        cells = [text_cell(each.mechanism), *([text_cell(each.setting)] if settings else [])]
        for value in values:
            mean = each.measure.of(each.groups[value]) if value in each.groups else None
            cell = estimate_cell(mean, each.measure.digits)
            cell.kind = "best" if value == each.best else ""
            cells.append(cell)
        rows.append(Row([*cells, Cell("–" if each.best is None else value_text(each.best))]))
    key = found[0].key
    words = key.replace("_", " ")
    ends = [each.mechanism for each in found if each.best in (next(iter(each.groups)), next(reversed(each.groups)))]
    notes = ["Bold: the best mean of the row; the difference may be due to chance.", *signs(found)]
    if ends and not isinstance(values[0], str):
        whose = ", ".join(dict.fromkeys(ends))
        notes.append(f"The best {words} is at the edge of the tested range, so another value may be better: {whose}.")
    return Table(
        "question-rates" if key == "learning_rate" else f"question-{key}",
        words[:1].upper() + words[1:],
        f"{found[0].measure.label} at each {words}, with all other settings equal, to check that no mechanism wins "
        "only because of a bad value for the other.",
        ["Mechanism", *(["Setting"] if settings else []), *map(value_text, values), f"Best {words.split()[-1]}"],
        rows,
        notes,
    )


def _stability_table(found: list[Swept]) -> Table:
    """Gradient norms after warm-up at each learning rate: an unstable run has large norms and many clipped steps."""
    measures = [make(AFTER_WARMUP) for make in (std_measure, largest_measure, clipped_measure)]
    settings = any(each.setting for each in found)
    rows = []
    for rate in sorted({rate for each in found for rate in each.groups}):
        for each in found:
            if (group := each.groups.get(rate)) is not None:
                cells = [Cell(f"{rate:g}"), text_cell(each.mechanism)]
                cells += [text_cell(each.setting)] if settings else []
                cells += [estimate_cell(measure.of(group), measure.digits) for measure in (each.measure, *measures)]
                rows.append(Row([*cells, Cell(str(len({run.seeds for run in counted(group)})))]))
    columns = ["Learning rate", "Mechanism", *(["Setting"] if settings else []), found[0].measure.label]
    return Table(
        "question-stability",
        "Stability at each learning rate",
        "The gradient norm before clipping, after the first 100 steps. With one seed there is no interval.",
        [*columns, *(measure.label for measure in measures), "Seeds"],
        rows,
        [],
        {measure.label: measure.title for measure in measures},
    )


def _numbers(comparison: Comparison) -> list[Cell]:
    delta = comparison.decisive
    if delta is None:
        return [Cell("–", title=comparison.reason), Cell("–")]
    cell = estimate_cell(delta, digits_for(delta, comparison.measure.digits), sign=True)
    cell.title += "" if delta.paired else "; no shared seeds: difference of two means"
    return [cell, Cell(str(delta.seeds))]


def _own_cell(comparison: Comparison) -> Cell:
    delta = comparison.delta
    if delta is None:
        return Cell("–")
    return estimate_cell(delta, digits_for(delta, comparison.measure.digits), sign=True)


def _error_cell(comparison: Comparison) -> Cell:
    delta = comparison.decisive
    if delta is None or delta.half_width is None:
        return text_cell("–")
    kind = "pooled" if comparison.pooled else "own" if delta.paired else "two means"
    return text_cell(f"{kind}, {delta.freedom} df", comparison.why_own)


def _p_cell(comparison: Comparison) -> Cell:
    delta = comparison.decisive
    p = comparison.adjusted if comparison.adjusted is not None else delta.p if delta else None
    if p is None:
        return Cell("–")
    text = "< 0.0001" if p < 1e-4 else f"{p:.4f}"
    return Cell(text if comparison.adjusted is not None else f"({text})")


def _family_cell(claim: Claim, setting: str, head: Comparison) -> Cell:
    verdict = claim.verdict(setting)
    kind = {HOLDS: "better", FAILS: "worse"}.get(verdict, "")
    detail = _verdict_cell(head).detail if verdict == OPEN else ""
    return Cell(verdict, detail, head.reason if verdict == OPEN else "", kind, numeric=False)


def _verdict_cell(comparison: Comparison) -> Cell:
    kind = {HOLDS: "better", FAILS: "worse", RAISED: "best", LOWERED: "best"}.get(comparison.verdict, "")
    detail = ""
    if comparison.verdict == OPEN and comparison.reason != ZERO:
        detail = "(no run)" if comparison.absent else f"({comparison.reason})"
    return Cell(comparison.verdict or "–", detail, comparison.reason, kind, numeric=False)


def _claimed_cell(comparison: Comparison) -> Cell:
    return text_cell(comparison.side or "–", "the claimed sign of the difference")


def _any_interval(found: list[Claim]) -> bool:
    return any(c.delta is not None and c.delta.interval for claim in found for c in claim.compared)


def _listed(absent: dict[str, list[str]]) -> str:
    return "; ".join(
        short(title, 60) + (f" (no run of {', '.join(short(n, 60) for n in names)})" if names else "")
        for title, names in absent.items()
    )
