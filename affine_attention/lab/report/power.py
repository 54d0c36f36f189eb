"""What the design can show: for each measure, the smallest difference whose interval excludes zero."""

from __future__ import annotations

from . import attention_measures as attention
from .cells import Cell, Row, Table, shown, text_cell
from .gradient_windows import AFTER_WARMUP, WINDOWS, clipped_measure, cv_measure
from .groups import Group
from .measures import counted, gradient_measures, quality_measures, task_measures
from .settings import settings_of


def power_table(groups: list[Group]) -> Table:
    """The residual deviation of each setting and measure, and the differences that its seeds can show."""
    tested, same_runs = quality_measures(groups)
    average = [measure for measure in task_measures(groups) if measure.label.startswith("Avg.")]
    cv = [measure for measure in gradient_measures() if measure.label == "CV"]
    measures = [*tested, *same_runs[:2], *average, attention.ENTROPY_OF_SOFTMAX, attention.FIRST_TOKEN_OF_SOFTMAX, *cv,
                cv_measure(WINDOWS[1]), clipped_measure(AFTER_WARMUP)]  # fmt: skip
    settings = settings_of(groups)
    several = any(setting.label for setting in settings)
    rows = []
    for setting in settings:
        finished = [group for group in setting.groups if group.finished]
        seeds = max((len({run.seeds for run in counted(group)}) for group in finished), default=0)
        for measure in measures:
            found = setting.pool(measure)
            if found is None:
                continue
            digits = max(4, measure.digits)
            cells = [*([text_cell(setting.label)] if several else []), text_cell(measure.label, measure.title)]
            cells += [Cell(str(found.cells)), Cell(str(seeds)), Cell(shown(found.deviation, digits))]
            cells += [Cell(str(found.freedom)), Cell(shown(found.visible_difference(seeds), digits))]
            cells += [Cell(shown(found.detectable_difference(seeds), digits)), Cell(f"{found.equal:.2g}")]
            rows.append(Row(cells))
    return Table(
        "power",
        "What these runs can show",
        "The deviation of one run after removing the means of the mechanisms and the effects of the seeds, and "
        "the difference of two mechanisms with all seeds that it makes visible.",
        [*(["Setting"] if several else []), "Measure", "Mechanisms", "Seeds", "Residual", "df", "Would show", "In 80 %",
         "Bartlett’s p"],
        rows,
        ["The interval of a difference larger than “would show” excludes zero; a true difference of the next column is "
         "found in 80 % of such studies. Where Bartlett’s p is below 0.05, the variances of the mechanisms differ: the "
         "pooled deviation is only an average, and verdicts use the pair’s own interval."],
        {"Residual": "standard deviation of the residuals", "df": "its degrees of freedom",
         "Would show": "half of the 95 % interval of a difference, before Holm's correction"},
        "No setting has two mechanisms with two seeds each; `affine study --seeds 0,1,2` makes them.",
    )  # fmt: skip
