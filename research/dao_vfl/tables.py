"""An experiment's tables: printed, and written as Markdown beside what the paper claims."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from research.afedcl.tables import Table
from research.dao_vfl import paper, views
from research.dao_vfl.cell import Finished
from research.dao_vfl.grids import FIXED
from research.dao_vfl.views import Measure, Panel
from research.runner import statistics

_LEGEND = (
    "Entries: mean ± standard deviation over seeds after the last round, [n] where n seeds have it; the last column "
    "compares with the first row, seed by seed, with a 95 % interval."
)


def show(name: str, panels: Sequence[Panel], folder: Path, console: Console) -> Path:
    """Print an experiment's tables and write them to FOLDER/NAME.md, which is returned."""
    made = [_table(name, panel) for panel in panels]
    told = views.conditions(each.cell for panel in panels for each in panel.results)
    words = f"{_LEGEND} {told}" if panels else "No cell is finished yet."
    parts = [f"# {paper.TITLES[name]}", f"The paper: {paper.CLAIMS[name]}", words]
    parts += [f"## {table.title}\n\n{table.markdown()}" for table in made]
    folder.mkdir(parents=True, exist_ok=True)
    (path := folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")
    for table in made:
        console.print(table.rich())
    console.print(f"The paper: {paper.CLAIMS[name]} {words}", markup=False, highlight=False)
    return path


def _table(name: str, panel: Panel) -> Table:
    shown = _columns(name, panel.data)
    main = views.measures(name, panel.data)[-1]
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
    return Table(panel.title, heads, rows)


def _columns(name: str, data: str) -> list[Measure]:
    if name in ("fig9", "fig10", "regret"):
        return [views.measures(name, data)[-1]]
    right = Measure("accuracy, %", "accuracy", 100)
    if data == "cifar10":
        return [right, Measure("loss", "loss")]
    return [Measure("RMSE", "rmse"), Measure("RMSE of the likeliest", "rmse_likeliest"), Measure("loss", "loss"), right]


def _last(panel: Panel, measure: Measure, variant: str) -> dict[int, float]:
    """By seed, after the last round; nothing of what diverged before."""
    found = views.curves(panel, measure, variant)
    results = panel.variants[variant]
    ends = {seed: curve.get(results[seed].cell.rounds) for seed, curve in found.items()}
    return {seed: value for seed, value in ends.items() if value is not None}


def _entry(values: Mapping[int, float], seeds: int) -> str:
    if not values:
        return "-"
    mean, deviation, count = statistics.spread(values.values())
    spread = f" ± {deviation:.2f}" if count > 1 else ""
    return f"{mean:.2f}{spread}{f' [{count}]' if count < seeds else ''}"


def _compared(values: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """In percent of the reference."""
    shares = {seed: 100 * value / reference[seed] for seed, value in values.items() if reference.get(seed)}
    found = statistics.paired(shares, dict.fromkeys(shares, 100.0))
    if found is None:
        return "-"
    return f"{found.mean:+.1f} %" + (f" ± {found.half:.1f}" if found.pairs > 1 else "")


def _note(results: Mapping[int, Finished]) -> str:
    rounds = [str(each.diverged) for each in results.values() if each.diverged]
    return f"round {', '.join(rounds)}" if rounds else ""
