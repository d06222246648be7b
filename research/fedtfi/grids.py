"""Grids: the federations of each table and figure of the paper (Peng et al., 2022)."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET

from research.fedtfi import variants
from research.fedtfi.cell import Cell, Finished, Setting
from research.fedtfi.presets import BOTH_1, BOTH_2, FEATURE, LABEL, Preset
from research.fedtfi.tuning import choose, plain, trials
from research.fedtfi.variants import FRAMEWORKS, Variant
from research.runner.panels import Entry
from research.runner.tuning import Pool, Trial
from trainer.federation.simulation import Device
from trainer.models.catalogue import ONLY_SIZE


class Scenario(NamedTuple):
    """How nodes differ."""

    partition: str
    classes_per_node: int  # #C; 0 where nodes have all classes


SCENARIOS = {
    LABEL: Scenario("groups", 1),
    FEATURE: Scenario("sources", 0),
    BOTH_1: Scenario("sources_groups", 1),
    BOTH_2: Scenario("sources_groups", 2),
}

# whose trials count for a scenario
_TUNED_IN = {LABEL: BOTH_1, FEATURE: FEATURE, BOTH_1: BOTH_1, BOTH_2: BOTH_1}


class Plan(NamedTuple):
    """What the cells of a grid have in common."""

    preset: Preset  # with the data sets that are there
    images: Mapping[str, str]  # their digests
    weights: Mapping[str, str]  # digests by network
    torch: str  # version
    device: Device = "cpu"
    tuned: Mapping[str, Mapping[Variant, Trial]] = {}  # by scenario

    def trial(self, variant: Variant, scenario: str) -> Trial:
        """A variant's trial: as tuned, or else with defaults."""
        options, training = self.tuned.get(_TUNED_IN[scenario], {}).get(variant.tuned) or plain(
            variant.tuned, self.preset.training
        )
        return Trial({**options, **dict(variant.options)}, training)

    def cell(
        self,
        data: str,
        scenario: str,
        variant: Variant,
        trial: Trial,
        seed: int,
        *,
        pool: Pool = "report",
        embed: bool = False,
    ) -> Cell:
        """One federation."""
        study, (partition, classes) = self.preset.studies[data], SCENARIOS[scenario]
        framework = FRAMEWORKS[variant.framework]
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
            model=variant.model,
            weights=self.weights[variant.model],
            size=ONLY_SIZE[variant.model],
            training=trial.training,
            rounds=self.preset.rounds,
            seed=seed,
            torch=self.torch,
            cuda=self.device == "cuda" or UNSET,
            embed=embed,
            head=variant.head,
        )


class Comparison(NamedTuple):
    """Variants that are compared, and scenarios."""

    variants: Callable[[Preset], dict[str, Variant]]
    scenarios: tuple[str, ...] = ()  # of a figure; empty = the preset's
    embed: bool = False  # features of one seed, in two dimensions
    pool: Pool = "report"


COMPARISONS = {
    "table2": Comparison(variants.table2),
    "table4": Comparison(variants.table4),
    "fig6": Comparison(variants.frameworks, (FEATURE,)),
    "fig7": Comparison(variants.frameworks, (LABEL,)),
    "fig8": Comparison(variants.frameworks, (FEATURE,)),
    "fig9": Comparison(variants.embedded, (FEATURE,), embed=True),
    "fig10": Comparison(variants.fig10, (FEATURE,)),
    "fuse": Comparison(variants.personal),
    "leak": Comparison(variants.protected, (BOTH_1,)),
    "negatives": Comparison(variants.negatives, (FEATURE, BOTH_1), pool="tuning"),
    "consensus": Comparison(variants.consensus, (FEATURE, BOTH_1)),
}
TUNE = "tune"


def grid(name: str, plan: Plan) -> list[Entry[Cell]]:
    """The cells of an experiment."""
    return tune(plan) if name == TUNE else compare(COMPARISONS[name], plan)


def tuned(name: str, plan: Plan, finished: Sequence[Finished]) -> dict[str, dict[Variant, Trial]]:
    """The best trials by scenario of those that an experiment compares;
    empty where not all have some.
    """
    compared = list(
        dict.fromkeys(variant.tuned for variant in COMPARISONS[name].variants(plan.preset).values())
    )

    def chosen(scenario: str) -> dict[Variant, Trial]:
        def is_comparable(cell: Cell) -> bool:
            place = Scenario(cell.setting.partition, cell.setting.classes_per_node)
            return place == SCENARIOS[scenario] and cell.weights == plan.weights.get(cell.model)

        return choose(compared, plan.preset.training, finished, is_comparable)

    return {scenario: chosen(scenario) for scenario in dict.fromkeys(_TUNED_IN.values())}


def tune(plan: Plan) -> list[Entry[Cell]]:
    """The trials of all variants, on the tuning pool, with one seed."""
    return [
        Entry(
            f"{variant.framework}, {variant.model}",
            data,
            scenario,
            plan.cell(data, scenario, variant, trial, 0, pool="tuning"),
        )
        for variant in variants.tuned(plan.preset)
        for data in plan.preset.studies
        if data == plan.preset.tuned_on
        for scenario in dict.fromkeys(_TUNED_IN.values())
        for trial in trials(variant, plan.preset.training)
    ]


def compare(comparison: Comparison, plan: Plan) -> list[Entry[Cell]]:
    """Variants in scenarios, where a data set has them, seed by seed."""

    def cell(data: str, scenario: str, variant: Variant, seed: int) -> Cell:
        trial = plan.trial(variant, scenario)
        return plan.cell(
            data, scenario, variant, trial, seed, pool=comparison.pool, embed=comparison.embed
        )

    return [
        Entry(name, data, scenario, cell(data, scenario, variant, seed))
        for seed in range(1 if comparison.embed else plan.preset.seeds)
        for data, study in plan.preset.studies.items()
        for scenario in study.scenarios
        if scenario in (comparison.scenarios or plan.preset.scenarios)
        for name, variant in comparison.variants(plan.preset).items()
    ]
