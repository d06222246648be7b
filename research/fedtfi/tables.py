"""Tables: accuracies beside the paper's, paired differences, curves' last values, trials."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from edge.terminal.formatting import pluralize
from research.fedtfi import reported
from research.fedtfi.cell import Cell, Finished
from research.fedtfi.data import DATASETS
from research.fedtfi.grids import TUNE
from research.runner import statistics
from research.runner.panels import Entry, Panel, shown_variants
from research.runner.tables import Table, format_difference, format_spread, mark_fewer

Measure = Callable[[Finished], float]
_CURVES = ("fig6", "fig7", "fig8", "fig9", "fig10")
_COMPARED = ("table2", "table4", "consensus")  # their last row with all others
_LOSS = "training loss"
_SHARED: Mapping[str, Measure] = {
    "accuracy, %": lambda found: 100 * found.accuracy,
    "F1, %": lambda found: 100 * found.curve[-1].f1,
    "AUC, %": lambda found: 100 * found.curve[-1].auc,
    _LOSS: lambda found: found.curve[-1].loss,
}
_LEGEND = (
    "Entries: accuracy % of the shared model after the last round on all nodes' held-out images, "
    "mean ± standard deviation over seeds; [n] where only n seeds are finished."
)
_PERSONAL = (
    "Entries: accuracy % of the model that each node serves, on its own held-out images, mean "
    "over nodes; mean ± standard deviation over seeds. The shared model serves where a framework "
    "has no other."
)
_HEADS = "A consensus head is each node's own; of these, the mean over nodes."
_TRIALS = (
    "Entries: accuracy % after the last round on held-out images of the tuning pool. The first "
    "that is best in the feature skew is taken for it, the first in the skew of both for what "
    "has a label skew."
)
_PRINTED = (
    "Below it what the paper prints, of its own cloth and larger networks (ResNet-18 / ResNet-50)."
)
_PAIRED = "Differences are paired by seed, with a 95 % interval."


def conditions(cells: Sequence[Cell]) -> str:
    """What cells have in common, in a line."""
    told = []
    for data in dict.fromkeys(cell.setting.data for cell in cells):
        own = [cell for cell in cells if cell.setting.data == data]
        setting, training = own[0].setting, own[0].training
        rounds = ", ".join(map(str, sorted({cell.rounds for cell in own})))
        told.append(
            f"{DATASETS[data].title}: {pluralize(len({cell.seed for cell in own}), 'seed')}, "
            f"{setting.nodes} nodes with {setting.samples} training images, {rounds} rounds, "
            f"batches of {training.batch_size}, "
            f"{', '.join(sorted({str(cell.size) for cell in own}))} px, {setting.pool} pool."
        )
    return " ".join([*told, f"torch {', '.join(sorted({cell.torch for cell in cells}))}."])


def make(
    name: str,
    entries: Sequence[Entry[Cell]],
    finished: Mapping[str, Finished],
    panels: Sequence[Panel[Finished]],
) -> tuple[list[Table], str]:
    """An experiment's tables, and what is to be known about them."""
    if name == TUNE:
        return _tuning(entries, finished), _TRIALS
    if name in _CURVES:
        return [_figures(panel) for panel in panels], _LEGEND
    by_data = defaultdict(list)
    for panel in panels:
        by_data[panel.data].append(panel)
    personal = name == "fuse"
    measure: Measure = (lambda found: 100 * found.personal) if personal else _SHARED["accuracy, %"]
    made = [_scenarios(name, each, measure) for each in by_data.values()]
    if name not in _COMPARED:
        return made, _PERSONAL if personal else _LEGEND
    more = _HEADS if name == "consensus" else _PRINTED
    return made + [
        _differences(each, measure) for each in by_data.values()
    ], f"{_LEGEND} {more} {_PAIRED}"


def _scenarios(name: str, panels: Sequence[Panel[Finished]], measure: Measure) -> Table:
    """A data set: a row for each variant, a column for each scenario."""
    printed = reported.PRINTED.get(name, {})
    rows = [
        [
            variant,
            *(
                "\n".join(
                    [
                        _entry(_values(panel, variant, measure), panel),
                        *(
                            f"paper {found}"
                            for found in [printed.get((variant, panel.scenario))]
                            if found
                        ),
                    ]
                )
                for panel in panels
            ),
        ]
        for variant in shown_variants(panels)
    ]
    return Table(DATASETS[panels[0].data].title, ["", *(panel.scenario for panel in panels)], rows)


def _differences(panels: Sequence[Panel[Finished]], measure: Measure) -> Table:
    """The grid's last variant minus each of the others."""
    own = panels[0].names[-1]
    others = [name for name in shown_variants(panels) if name != own]
    rows = [
        [
            variant,
            *(
                _difference(_values(panel, own, measure), _values(panel, variant, measure))
                for panel in panels
            ),
        ]
        for variant in others
    ]
    title = f"{DATASETS[panels[0].data].title}: {own} minus each of the others, points"
    return Table(title, ["", *(panel.scenario for panel in panels)], rows)


def _figures(panel: Panel[Finished]) -> Table:
    rows = [
        [
            variant,
            *(
                _entry(_values(panel, variant, of), panel, 3 if what == _LOSS else 1)
                for what, of in _SHARED.items()
            ),
        ]
        for variant in panel.variants
    ]
    return Table(f"{DATASETS[panel.data].title}, {panel.scenario}", ["", *_SHARED], rows)


def _values(panel: Panel[Finished], variant: str, measure: Measure) -> dict[int, float]:
    """By seed."""
    return {seed: measure(found) for seed, found in panel.variants.get(variant, {}).items()}


def _entry(values: Mapping[int, float], panel: Panel[Finished], digits: int = 1) -> str:
    if not values:
        return "-"
    planned = max(map(len, panel.variants.values()))
    return format_spread(values.values(), digits) + mark_fewer(len(values), planned)


def _difference(own: Mapping[int, float], other: Mapping[int, float]) -> str:
    difference = statistics.paired_difference(own, other)
    return format_difference(difference) if difference else "-"


def _tuning(entries: Sequence[Entry[Cell]], finished: Mapping[str, Finished]) -> list[Table]:
    """A row for each trial of each variant; a column for each data set and scenario."""
    variants = defaultdict(list)
    for entry in entries:
        if entry.cell.key in finished:
            variants[entry.variant].append(entry)
    places = list(dict.fromkeys(_place(entry) for each in variants.values() for entry in each))
    rows = []
    for name, each in variants.items():
        reached: dict[str, dict[str, float]] = defaultdict(dict)
        for entry, trial in zip(each, _trials([entry.cell for entry in each]), strict=True):
            reached[trial][_place(entry)] = 100 * finished[entry.cell.key].accuracy
        best = {place: max(found.get(place, 0.0) for found in reached.values()) for place in places}
        for trial, found in reached.items():
            rows.append([name, trial, *(_tried(found.get(place), best[place]) for place in places)])
    return [Table("Trials", ["variant", "trial", *places], rows)] if rows else []


def _tried(reached: float | None, best: float) -> str:
    if reached is None:
        return "-"
    return f"{reached:.1f}" + (" best" if reached == best else "")


def _place(entry: Entry[Cell]) -> str:
    return f"{DATASETS[entry.data].title}, {entry.scenario}"


def _trials(cells: Sequence[Cell]) -> list[str]:
    """Of each cell, the settings in which these cells differ."""
    settings = [{"learning_rate": cell.training.learning_rate, **cell.options} for cell in cells]
    varied = [name for name in settings[0] if len({str(each[name]) for each in settings}) > 1]
    return [", ".join(f"{name} {each[name]}" for name in varied) for each in settings]
