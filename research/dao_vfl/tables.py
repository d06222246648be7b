"""Tables: a data set each, a row for each variant, after the last round."""

from collections.abc import Mapping

from research.dao_vfl import measures, reported
from research.dao_vfl.cell import Finished
from research.dao_vfl.grids import FIXED
from research.dao_vfl.measures import Measure
from research.runner import statistics
from research.runner.panels import Panel
from research.runner.tables import Table, format_difference, format_spread, mark_fewer

LEGEND = (
    "Entries: mean ± standard deviation over seeds after the last round, [n] where n seeds have it; the last column "
    "compares with the first row, seed by seed, with a 95 % interval."
)


def table(name: str, panel: Panel[Finished]) -> Table:
    """A data set: a row for each variant, a column for each measure."""
    shown = _columns(name, panel.data)
    main = measures.shown(name, panel.data)[-1]
    reference = _last(panel, main, next(iter(panel.variants)))
    seeds = max(map(len, panel.variants.values()))
    rows = [
        [
            variant,
            *(_entry(_last(panel, measure, variant), seeds) for measure in shown),
            _compared(_last(panel, main, variant), reference) if number else "",
            _note(results),
        ]
        for number, (variant, results) in enumerate(panel.variants.items())
        if variant != FIXED  # what regret is against
    ]
    if not any(row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    heads = ["", *(measure.name for measure in shown), "beside the first", "diverged"][: len(rows[0])]
    return Table(reported.DATASETS[panel.data], heads, rows)


def _columns(name: str, data: str) -> list[Measure]:
    if name in ("fig9", "fig10", "regret"):
        return [measures.shown(name, data)[-1]]
    right = Measure("accuracy, %", "accuracy", 100)
    if data == "cifar10":
        return [right, Measure("loss", "loss")]
    return [Measure("RMSE", "rmse"), Measure("RMSE of the likeliest", "rmse_likeliest"), Measure("loss", "loss"), right]


def _last(panel: Panel[Finished], measure: Measure, variant: str) -> dict[int, float]:
    """By seed, after the last round; nothing of what diverged before."""
    found = measures.curves(panel, measure, variant)
    results = panel.variants[variant]
    ends = {seed: curve.get(results[seed].cell.rounds) for seed, curve in found.items()}
    return {seed: value for seed, value in ends.items() if value is not None}


def _entry(values: Mapping[int, float], seeds: int) -> str:
    return format_spread(values.values(), 2) + mark_fewer(len(values), seeds) if values else "-"


def _compared(values: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """In percent of the reference."""
    shares = {seed: 100 * value / reference[seed] for seed, value in values.items() if reference.get(seed)}
    difference = statistics.paired_difference(shares, dict.fromkeys(shares, 100.0))
    return format_difference(difference, " %") if difference else "-"


def _note(results: Mapping[int, Finished]) -> str:
    rounds = [str(each.diverged) for each in results.values() if each.diverged]
    return f"round {', '.join(rounds)}" if rounds else ""
