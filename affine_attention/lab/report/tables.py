"""The paper's Tables 1 to 5 for groups of runs, and the differences to the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import paper_numbers
from .cells import Cell, Row, Table, blank, estimate_cell, mark_best, shown, text_cell
from .groups import Group, omitted_settings
from .measures import (
    EARLY,
    Measure,
    counted,
    delta_parameters,
    gradient_measures,
    incomparable,
    loss_measures,
    paper_tasks,
    perplexity_measures,
    quality_measures,
    spike_measures,
    task_measures,
)
from .settings import settings_of
from .text import short
from .verdicts import Comparison, compare

GATED = ("gated", "affine_gated")
SEEDS_NOTE = (
    "With two or more seeds: mean ± half of the 95 % interval (Student's t over seeds). With one seed there is no "
    "interval; brackets show the standard error of the task. Bold is the best of its column within a recipe; the "
    "difference may be due to chance."
)


def table_1(groups: list[Group]) -> Table:
    """Quality of every mechanism without an output gate."""
    shown_groups = [group for group in groups if group.mechanism_name not in GATED]
    return _quality_table(
        "table-1",
        "Table 1: mechanisms compared",
        "Extra parameters, training loss, perplexity and zero-shot accuracy (%) of each mechanism.",
        shown_groups,
        paper_numbers.TABLE_1,
        "No run of softmax, sink, affine or a control was given. "
        "`affine train --mechanism affine` makes one, `affine evaluate RUN` measures it.",
    )


def table_2(groups: list[Group]) -> Table:
    """The output gate alone, and combined with affine scaling."""
    gated = [group for group in groups if group.mechanism_name in GATED]
    recipes = {group.recipe_name for group in gated}
    with_baseline = [g for g in groups if g in gated or (g.is_baseline and g.recipe_name in recipes)]
    return _quality_table(
        "table-2",
        "Table 2: with an output gate",
        "Gated attention alone and combined with affine scaling, compared with the baseline.",
        with_baseline,
        paper_numbers.TABLE_2,
        "No run with a gate was given. `affine train --mechanism gated` and `--mechanism affine_gated` make them.",
    )


def _quality_table(
    key: str, title: str, caption: str, groups: list[Group], paper: Sequence[paper_numbers.Result], missing: str
) -> Table:
    losses, perplexities, tasks = loss_measures(groups), perplexity_measures(groups), task_measures(groups)
    measures = [*losses, *perplexities, *tasks]
    columns = [*head_columns(groups), "Δ params (M)", *(measure.label for measure in measures)]
    rows: list[Row] = []
    for recipe in dict.fromkeys(group.recipe_name for group in groups):
        mine = [group for group in groups if group.recipe_name == recipe]
        block = [[*head_cells(group, groups), _parameter_cell(group, groups)] for group in mine]
        for measure in measures:
            cells = [estimate_cell(measure.of(group), measure.digits, measure.error_of(group)) for group in mine]
            _mark_best(cells, mine, measure)
            for row, cell in zip(block, cells, strict=True):
                row.append(cell)
        rows += [Row(row) for row in block]
        for result in _same_setting(mine, paper):
            rows.append(Row(_paper_cells(result, recipe, groups, measures), "paper"))
    notes = [SEEDS_NOTE, *([note] if (note := omitted_settings(groups)) else [])] if rows else []
    if any(not run.evaluation for group in groups for run in group.runs):
        notes.append("Some runs were not evaluated yet; `affine evaluate RUN` measures perplexity and accuracies.")
    notes += incomparable(groups)
    return Table(
        key, title, caption, columns, rows, notes,
        {measure.label: measure.title for measure in measures}, missing,
    )  # fmt: skip


def delta_table(groups: list[Group]) -> Table:
    """Every measure of every mechanism minus that of the baseline."""
    measures = delta_measures(groups)
    rows, without = [], []
    for setting in settings_of(groups):
        baseline = next((group for group in setting.groups if group.is_baseline), None)
        for group in setting.groups:
            if group.is_baseline:
                continue
            if baseline is None:
                without.append(short(group.label, 60))
                continue
            found = [compare(measure, ("", group), ("", baseline), None, setting) for measure in measures]
            if any(each.delta for each in found):
                rows.append(Row([*head_cells(group, groups), *(_delta_cell(each) for each in found)]))
    notes = [
        "Differences are computed per seed, then averaged; ± is half of the 95 % interval with the error term of the "
        "setting, or of the pair where variances differ. The interval of a marked cell excludes zero, without a "
        "correction for the number of cells. With one seed there is no interval, and a difference may be noise."
    ]
    if without:
        notes.append(f"No softmax run with the same recipe and settings for: {', '.join(without)}.")
    return Table(
        "deltas",
        "Differences to softmax in numbers",
        "Each mechanism minus the softmax baseline of the same recipe, paired by seed; perplexities as logarithms.",
        [*head_columns(groups), *(f"Δ {measure.label}" for measure in measures)],
        rows,
        notes,
        {f"Δ {m.label}": f"{m.title}; {m.better} is better".removeprefix("; ") for m in measures},
        "There is no finished pair of softmax and another mechanism with the same recipe and settings. "
        "`affine train --mechanism softmax` makes the baseline.",
    )


def delta_measures(groups: list[Group]) -> list[Measure]:
    """What is compared with softmax: losses, logarithms of perplexities and accuracies."""
    tested, same_runs = quality_measures(groups)
    return [*tested, *same_runs, *task_measures(groups)]


def table_3(groups: list[Group]) -> Table:
    """Sigmoid versus linear clipping as the activation of alpha."""
    measures = [*loss_measures(groups), *task_measures(groups)[: len(paper_tasks(groups)) + 1]]
    measures = [measure for measure in measures if measure.label.startswith(("Loss", "Held-out", "Avg."))]
    chosen = [group for group in groups if group.mechanism.get("activation") and group.mechanism.get("bias")]
    both = {"sigmoid", "linear_clipping"} <= {str(group.mechanism.get("activation")) for group in chosen}
    rows = []
    for group in chosen if both else ():
        cells = [estimate_cell(measure.of(group), measure.digits, measure.error_of(group)) for measure in measures]
        rows.append(Row([*head_cells(group, groups), text_cell(group.mechanism["activation"]), *cells]))
    if rows and any(group.paper_size == "1B" for group in chosen):
        for activation, average in paper_numbers.TABLE_3.items():
            cells = [Cell(shown(average, 1)) if measure.label == "Avg." else blank() for measure in measures]
            head = [text_cell("paper: Affine-Scaled, 1B"), *(blank() for _ in head_columns(groups)[1:])]
            rows.append(Row([*head, text_cell(activation), *cells], "paper"))
    return Table(
        "table-3",
        "Table 3: activation of α",
        "Sigmoid versus linear clipping as φ in α = φ(W_a x).",
        [*head_columns(groups), "Activation", *(measure.label for measure in measures)],
        rows,
        [],
        {measure.label: measure.title for measure in measures},
        "These runs do not include both activations. "
        "`affine train --mechanism affine --set mechanism.activation=sigmoid` makes the other one.",
    )


def table_4(groups: list[Group]) -> Table:
    """Gradient norms early in training."""
    return _gradient_table(
        "table-4",
        "Table 4: gradient norm, steps 0–500",
        "Mean, standard deviation, variance and coefficient of variation of the norm before clipping, not smoothed.",
        groups,
        gradient_measures(),
        ("mean", "std", "variance", "cv"),
    )


def table_5(groups: list[Group]) -> Table:
    """Spikes of the gradient norm early in training."""
    return _gradient_table(
        "table-5",
        "Table 5: spikes of the gradient norm, steps 0–500",
        "Steps whose norm exceeds median + k · MAD of the run's own steps.",
        groups,
        spike_measures(),
        ("spikes_6", "spikes_9"),
    )


def _gradient_table(
    key: str, title: str, caption: str, groups: list[Group], measures: list[Measure], fields: tuple[str, ...]
) -> Table:
    having = [group for group in groups if measures[0].of(group)]
    rows = []
    for recipe in dict.fromkeys(group.recipe_name for group in having):
        mine = [group for group in having if group.recipe_name == recipe]
        block = [head_cells(group, groups) for group in mine]
        for measure in measures:
            cells = [estimate_cell(measure.of(group), measure.digits) for group in mine]
            _mark_best(cells, mine, measure)
            for row, cell in zip(block, cells, strict=True):
                row.append(cell)
        rows += [Row(row) for row in block]
        for result in _same_setting(mine, paper_numbers.TABLES_4_AND_5):
            head = _paper_head(result.method, recipe, groups)
            cells = [Cell(_plain(getattr(result, field))) for field in fields]
            rows.append(Row([*head, *cells], "paper"))
    brief = [short(group.label, 60) for group in having if min(run.steps for run in counted(group)) < EARLY]
    notes = []
    if brief:
        whose = "every run here" if len(brief) == len(having) else ", ".join(brief)
        notes.append(f"Fewer than {EARLY} steps in {whose}: all available steps were counted.")
    return Table(
        key, title, caption, [*head_columns(groups), *(measure.label for measure in measures)], rows, notes,
        {measure.label: measure.title for measure in measures},
        "No run has gradient norms in its log yet; `affine train` writes them.",
    )  # fmt: skip


def paper_table(key: str) -> Table:
    """The paper's own table, for reference."""
    if key in ("table-1", "table-2"):
        results = paper_numbers.TABLE_1 if key == "table-1" else paper_numbers.TABLE_2
        columns = ["Model", "Method", "Δ params (M)", "Loss", "C4 PPL", *paper_numbers.TASKS.values(), "Avg."]
        rows = [
            Row([text_cell(r.size), text_cell(r.method), *(Cell(_plain(v)) for v in
                 (r.delta_parameters, r.loss, r.perplexity, *r.accuracies, r.average))], "paper")
            for r in results
        ]  # fmt: skip
        words = {"table-1": "Baseline, attention sink and Affine-Scaled.", "table-2": "With an output gate."}[key]
    elif key == "table-3":
        columns = ["Model", "Activation", "CSR Avg."]
        rows = [
            Row([text_cell("1B"), text_cell(name), Cell(_plain(value))], "paper")
            for name, value in paper_numbers.TABLE_3.items()
        ]
        words = "Average accuracy of the 1B model by activation of α."
    else:
        columns = ["Model", "Method", "Mean", "Std", "Variance", "CV", "Spikes (k = 6)", "Spikes (k = 9)"]
        rows = [
            Row([text_cell(r.size), text_cell(r.method), *(Cell(_plain(v)) for v in
                 (r.mean, r.std, r.variance, r.cv, r.spikes_6, r.spikes_9))], "paper")
            for r in paper_numbers.TABLES_4_AND_5
        ]  # fmt: skip
        words = "Gradient norms of steps 0–500: moments and spikes."
    number = {"table-4": "Tables 4 and 5"}.get(key, key.replace("table-", "Table "))
    return Table(f"paper-{key}", f"{number} of the paper", words, columns, rows)


def head_columns(groups: list[Group]) -> list[str]:
    several = len({group.recipe_name for group in groups}) > 1
    return ["Mechanism", *(["Recipe"] if several else []), "Seeds"]


def head_cells(group: Group, groups: list[Group]) -> list[Cell]:
    head = [text_cell(group.method)]
    if "Recipe" in head_columns(groups):
        head.append(text_cell(group.recipe_name))
    seeds = len({run.seeds for run in counted(group)})
    waiting = [run.status for run in group.runs if not run.finished]
    if waiting and len(waiting) == len(group.runs):
        return [*head, Cell(str(seeds), "unfinished", "; ".join(waiting))]
    return [*head, Cell(str(seeds), f"+ {len(waiting)} unfinished" if waiting else "", "; ".join(waiting))]


def _parameter_cell(group: Group, groups: list[Group]) -> Cell:
    extra = delta_parameters(group, groups)
    return blank() if math.isnan(extra) else Cell(shown(extra / 1e6, 3), title=f"{extra:,.0f} parameters", value=extra)


def _delta_cell(found: Comparison) -> Cell:
    delta = found.decisive
    cell = estimate_cell(delta, found.measure.digits, sign=True)
    if delta is None:
        return cell
    how = "paired by seed" if delta.paired else "no shared seeds: difference of two means"
    cell.title = f"{cell.title}; {how}; {'pooled error' if found.pooled else 'error of the pair'}"
    if delta.interval and not delta.interval[0] <= 0 <= delta.interval[1]:
        cell.kind = "better" if (delta.mean < 0) == (found.measure.better == "lower") else "worse"
    return cell


def _mark_best(cells: list[Cell], groups: list[Group], measure: Measure) -> None:
    """Marks the best among finished groups: the numbers of unfinished runs are not final."""
    mark_best([c for c, group in zip(cells, groups, strict=True) if group.finished], measure.better)


def _same_setting(groups: list[Group], results: Sequence) -> list:
    """The paper's rows with the setting and the mechanisms of these groups."""
    here = {(group.paper_size, group.mechanism_name) for group in groups if group.paper_size}
    return [result for result in results if (result.size, result.mechanism) in here]


def _paper_head(method: str, recipe: str, groups: list[Group]) -> list[Cell]:
    middle = [text_cell(recipe)] if "Recipe" in head_columns(groups) else []
    return [text_cell(f"paper: {method}"), *middle, Cell("–", title="the paper gives no number of seeds")]


def _paper_cells(result, recipe: str, groups: list[Group], measures: list[Measure]) -> list[Cell]:
    by_label = dict(zip(paper_numbers.TASKS.values(), result.accuracies, strict=True))
    by_label |= {"Loss": result.loss, "Avg.": result.average}
    by_label |= {m.label: result.perplexity for m in measures if m.label.lower().startswith("c4") and "PPL" in m.label}
    cells = [Cell(_plain(by_label[m.label])) if m.label in by_label else blank() for m in measures]
    return [*_paper_head(result.method, recipe, groups), Cell(_plain(result.delta_parameters)), *cells]


def _plain(value: float) -> str:
    return f"{value}"
