"""The grids: which federations each table and figure of the paper (Peng et al., 2022) takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET

from research.afedcl.tuning import Trial
from research.fedtfi import contenders
from research.fedtfi.cell import Cell, Finished, Pool, Setting
from research.fedtfi.contenders import FRAMEWORKS, Contender
from research.fedtfi.presets import BOTH_1, BOTH_2, FEATURE, LABEL, Preset
from research.fedtfi.tuning import choose, plain, trials
from trainer.models.catalogue import SIZES
from trainer.training.simulation import Device


class Scenario(NamedTuple):
    """How nodes differ."""

    partition: str
    classes: int  # #C; 0 where nodes have all classes


SCENARIOS = {
    LABEL: Scenario("groups", 1),
    FEATURE: Scenario("sources", 0),
    BOTH_1: Scenario("sources_groups", 1),
    BOTH_2: Scenario("sources_groups", 2),
}

_TUNED_IN = {LABEL: BOTH_1, FEATURE: FEATURE, BOTH_1: BOTH_1, BOTH_2: BOTH_1}  # whose trials count for a scenario


class Entry(NamedTuple):
    """A cell by the names that tables and figures have for it."""

    variant: str
    scenario: str
    cell: Cell


class Plan(NamedTuple):
    """What the cells of a grid have in common."""

    preset: Preset  # with the data sets that are there
    images: Mapping[str, str]  # their digests
    weights: Mapping[str, str]  # digests by network
    torch: str  # version
    device: Device = "cpu"
    tuned: Mapping[str, Mapping[Contender, Trial]] = {}  # by scenario

    def trial(self, who: Contender, scenario: str) -> Trial:
        """What it is run with: as tuned, or else with defaults."""
        own = who._replace(options=())
        options, training = self.tuned.get(_TUNED_IN[scenario], {}).get(own) or plain(own, self.preset.training)
        return Trial({**options, **dict(who.options)}, training)

    def cell(
        self,
        data: str,
        scenario: str,
        who: Contender,
        trial: Trial,
        seed: int,
        *,
        pool: Pool = "report",
        embed: bool = False,
    ) -> Cell:
        """One federation."""
        study, (partition, classes) = self.preset.studies[data], SCENARIOS[scenario]
        framework = FRAMEWORKS[who.framework]
        return Cell(
            setting=Setting(
                data=data,
                images=self.images[data],
                partition=partition,
                classes_per_node=classes,
                nodes=study.nodes,
                samples=study.samples,
                test_samples=study.test_samples,
                shared=study.shared if framework.shares else 0,
                pool=pool,
            ),
            method=framework.method,
            options=trial.options,
            model=who.model,
            weights=self.weights[who.model],
            size=SIZES[who.model],
            training=trial.training,
            rounds=self.preset.rounds,
            seed=seed,
            torch=self.torch,
            cuda=self.device == "cuda" or UNSET,
            embed=embed,
        )


class Comparison(NamedTuple):
    """Who is compared, and where."""

    who: Callable[[Preset], dict[str, Contender]]
    scenarios: tuple[str, ...] = ()  # of a figure; empty = the preset's
    embed: bool = False  # features of one seed, in two dimensions


COMPARISONS = {
    "table2": Comparison(contenders.table2),
    "table4": Comparison(contenders.table4),
    "fig6": Comparison(contenders.frameworks, (FEATURE,)),
    "fig7": Comparison(contenders.frameworks, (LABEL,)),
    "fig8": Comparison(contenders.frameworks, (FEATURE,)),
    "fig9": Comparison(contenders.embedded, (FEATURE,), embed=True),
    "fig10": Comparison(contenders.fig10, (FEATURE,)),
    "fuse": Comparison(contenders.personal),
    "leak": Comparison(contenders.protected, (BOTH_1,)),
}
TUNE = "tune"
EXPERIMENTS = (TUNE, *COMPARISONS)


def grid(name: str, plan: Plan) -> list[Entry]:
    """The cells of an experiment."""
    return tune(plan) if name == TUNE else compare(COMPARISONS[name], plan)


def tuned(name: str, plan: Plan, finished: Sequence[Finished]) -> dict[str, dict[Contender, Trial]]:
    """The best trials by scenario of those whom an experiment compares; empty where not all have some."""
    compared = [who._replace(options=()) for who in COMPARISONS[name].who(plan.preset).values()]

    def chosen(scenario: str) -> dict[Contender, Trial]:
        def suits(cell: Cell) -> bool:
            place = Scenario(cell.setting.partition, cell.setting.classes_per_node)
            return place == SCENARIOS[scenario] and cell.weights == plan.weights.get(cell.model)

        return choose(compared, plan.preset.training, finished, suits)

    return {scenario: chosen(scenario) for scenario in dict.fromkeys(_TUNED_IN.values())}


def tune(plan: Plan) -> list[Entry]:
    """The trials of all contenders, on the tuning pool, with one seed."""
    return [
        Entry(f"{who.framework}, {who.model}", scenario, plan.cell(data, scenario, who, trial, 0, pool="tuning"))
        for data in plan.preset.studies
        if data == plan.preset.tuned_on
        for scenario in dict.fromkeys(_TUNED_IN.values())
        for who in contenders.everyone(plan.preset)
        for trial in trials(who, plan.preset.training)
    ]


def compare(comparison: Comparison, plan: Plan) -> list[Entry]:
    """Contenders in scenarios, where a data set has them, on the report pool, seed by seed."""
    return [
        Entry(name, scenario, plan.cell(data, scenario, who, plan.trial(who, scenario), seed, embed=comparison.embed))
        for seed in range(1 if comparison.embed else plan.preset.seeds)
        for data, study in plan.preset.studies.items()
        for scenario in study.scenarios
        if scenario in (comparison.scenarios or plan.preset.scenarios)
        for name, who in comparison.who(plan.preset).items()
    ]


def distinct(entries: Iterable[Entry]) -> list[Cell]:
    """The cells, each once."""
    return list({entry.cell.key: entry.cell for entry in entries}.values())
