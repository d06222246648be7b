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
    "Entries: mean ± standard deviation over seeds after the last round, or of the mean of all "
    "measured rounds, [n] where n seeds have it; beside them a comparison with the first row, "
    "seed by seed, with a 95 % interval."
)


def table(name: str, panel: Panel[Finished]) -> Table:
    """A data set: a row for each variant, a column for each measure,
    what is compared with the first row beside it.
    """
    compared, alone = _columns(name, panel.data)
    first = next(iter(panel.variants))
    seeds = max(map(len, panel.variants.values()))
    rows = []
    for variant, results in panel.variants.items():
        if variant == FIXED:  # what regret is against
            continue
        row = [variant]
        for measure in compared:
            values = _last(panel, measure, variant)
            row += [
                _entry(values, seeds),
                _compared(values, _last(panel, measure, first)) if variant != first else "",
            ]
        row += [_entry(_last(panel, measure, variant), seeds) for measure in alone]
        rows.append([*row, _note(results)])
    if not any(row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    heads = ["", *(head for measure in compared for head in (measure.name, "beside the first"))]
    heads += [*(measure.name for measure in alone), "diverged"]
    return Table(reported.DATASETS[panel.data], heads[: len(rows[0])], rows)


def _columns(name: str, data: str) -> tuple[list[Measure], list[Measure]]:
    """Measures that are compared with the first row's, and others."""
    main, loss = measures.shown(name, data)[-1], Measure("loss", "loss")
    if name in ("fig9", "fig10", "regret"):
        return [main], []
    compared = [main, Measure(f"{main.name}, mean of the rounds", f"mean {main.key}", main.scale)]
    return compared, [loss] if data == "cifar10" else [
        Measure("RMSE of the likeliest", "rmse_likeliest"),
        loss,
    ]


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
    shares = {
        seed: 100 * value / reference[seed] for seed, value in values.items() if reference.get(seed)
    }
    difference = statistics.paired_difference(shares, dict.fromkeys(shares, 100.0))
    return format_difference(difference, " %") if difference else "-"


def _note(results: Mapping[int, Finished]) -> str:
    rounds = [str(each.diverged) for each in results.values() if each.diverged]
    return f"round {', '.join(rounds)}" if rounds else ""
