"""The tables of the section "The paper's claims"."""

from __future__ import annotations

from .cells import Cell, Row, Table, estimate_cell, text_cell
from .claims import Claim, claims
from .groups import Group
from .page import details_html, escaped, table_html
from .questions import Rates, questions, rates, signs
from .text import short
from .verdicts import FAILS, HOLDS, OPEN, RULE, ZERO, Comparison, digits_for, tally

ONE_SEED = (
    "There is only one seed, so these differences may be due to chance and no verdict is given: another seed can "
    "reverse them. `affine study --seeds 0,1,2` runs the seeds that a verdict needs; two seeds are the minimum, and "
    "three make the interval about three times narrower than two."
)


def claim_tables(groups: list[Group]) -> list[Table]:
    """The summary, then one table for each claim and question that has differences."""
    found, asked = claims(groups), questions(groups)
    several = _any_interval([*found, *asked])
    tables = [_summary(found, several)]
    tables += [_claim_table(claim, several) for claim in [*found, *asked] if claim.compared]
    if swept := rates(groups):
        tables.append(_rate_table(swept))
    return tables


def claims_html(groups: list[Group]) -> str:
    """The section of the page; the single tables are collapsed if there are no intervals."""
    summary, *others = claim_tables(groups)
    content = "".join(table_html(table) for table in others)
    if others and "Verdict" not in summary.columns:
        content = details_html(escaped("Every difference behind this table"), content)
    return table_html(summary) + content


def _summary(found: list[Claim], several: bool) -> Table:
    """One row per claim and setting: the main comparison, and the verdicts of all comparisons."""
    found = [claim for claim in found if claim.key != "claim-controls"]  # several separate questions
    columns = ["Claim", "Verdict" if several else "Claimed", "Difference", "Comparison", "Measure", "Seeds"]
    columns += ["All comparisons"] if several else []
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
            cells += [_verdict_cell(head) if several else _claimed_cell(head)]
            cells += [difference, text_cell(head.name), text_cell(head.measure.label, head.measure.title), seeds]
            cells += [text_cell(tally(each for each in mine if each.delta) or "–")] if several else []
            rows.append(Row(cells))
    notes = [RULE, _chance(found)] if several else [ONE_SEED]
    notes += [f"No runs to compare for: {_listed(absent)}."] if absent else []
    return Table(
        "verdicts",
        "The paper’s claims and the results of these runs",
        "The main comparison for each claim; all comparisons are in the tables below."
        if several
        else "The main difference for each claim; all differences are below.",
        columns,
        rows,
        [note for note in notes if note],
        {"All comparisons": "verdicts of all measures and pairs that have runs"},
        "No claim can be tested: this needs runs of affine and softmax with the same recipe and settings. "
        "`affine study` makes them.",
    )


def _claim_table(claim: Claim, several: bool) -> Table:
    settings = any(each.setting for each in claim.comparisons)
    columns = ["Comparison", "Measure", "Verdict" if several else "Claimed", "Difference"]
    columns += [*(["Setting"] if settings else []), "Seeds"]
    rows = []
    for each in claim.compared:
        difference, seeds = _numbers(each)
        cells = [text_cell(each.name), text_cell(each.measure.label, each.measure.title)]
        cells += [_verdict_cell(each) if several else _claimed_cell(each)]
        cells += [difference, *([text_cell(each.setting)] if settings else []), seeds]
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
    return Table(claim.key, claim.title, f"{claim.sentence} ({claim.where})", columns, rows, notes)


def _rate_table(swept: list[Rates]) -> Table:
    """The measure of each mechanism at each learning rate, and the best rate."""
    all_rates = sorted({rate for each in swept for rate in each.groups})
    settings = any(each.setting for each in swept)
    rows = []
    for each in swept:
        cells = [text_cell(each.mechanism), *([text_cell(each.setting)] if settings else [])]
        for rate in all_rates:
            found = each.measure.of(each.groups[rate]) if rate in each.groups else None
            cell = estimate_cell(found, each.measure.digits)
            cell.kind = "best" if rate == each.best else ""
            cells.append(cell)
        rows.append(Row([*cells, Cell("–" if each.best is None else f"{each.best:g}")]))
    ends = [each.mechanism for each in swept if each.best in (min(each.groups), max(each.groups))]
    notes = ["Bold: the best mean of the row; the difference may be due to chance.", *signs(swept)]
    if ends:
        whose = ", ".join(dict.fromkeys(ends))
        notes.append(f"The best rate is at the edge of the tested range, so another rate may be better: {whose}.")
    return Table(
        "question-rates",
        "Learning rate",
        f"{swept[0].measure.label} at each learning rate, with all other settings equal, to check that no mechanism "
        "wins because of a bad rate for the other.",
        ["Mechanism", *(["Setting"] if settings else []), *(f"{rate:g}" for rate in all_rates), "Best rate"],
        rows,
        notes,
    )


def _numbers(comparison: Comparison) -> list[Cell]:
    delta = comparison.delta
    if delta is None:
        return [Cell("–", title=comparison.reason), Cell("–")]
    cell = estimate_cell(delta, digits_for(delta, comparison.measure.digits), sign=True)
    cell.title += "" if delta.paired else "; no shared seeds: difference of two means"
    return [cell, Cell(str(delta.seeds))]


def _verdict_cell(comparison: Comparison) -> Cell:
    kind = {HOLDS: "better", FAILS: "worse"}.get(comparison.verdict, "")
    detail = ""
    if comparison.verdict == OPEN and comparison.reason != ZERO:
        detail = "(no run)" if comparison.absent else f"({comparison.reason})"
    return Cell(comparison.verdict or "–", detail, comparison.reason, kind, numeric=False)


def _claimed_cell(comparison: Comparison) -> Cell:
    return text_cell(comparison.side or "–", "the claimed sign of the difference")


def _any_interval(found: list[Claim]) -> bool:
    return any(c.delta is not None and c.delta.interval for claim in found for c in claim.compared)


def _chance(found: list[Claim]) -> str:
    """The expected number of intervals that exclude zero by chance."""
    count = sum(c.verdict != "" and c.delta.interval is not None for claim in found for c in claim.compared if c.delta)
    expected = 0.05 * count
    if expected < 1:
        return ""
    return (
        f"Of these {count} intervals, about {expected:.0f} would exclude zero by chance if there were no differences; "
        "an isolated verdict is weak evidence."
    )


def _listed(absent: dict[str, list[str]]) -> str:
    return "; ".join(
        short(title, 60) + (f" (no run of {', '.join(short(n, 60) for n in names)})" if names else "")
        for title, names in absent.items()
    )
