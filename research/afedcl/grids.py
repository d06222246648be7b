"""Grids: the federations of each table and figure of the paper (Cui et al., 2024)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from broker_config.protocol.messages import Codec, Option, Training
from research.afedcl.cell import Cell, Setting
from research.afedcl.datasets import DATASETS
from research.afedcl.factors import COMMON, OWN, vary
from research.afedcl.tuning import plain, trials
from research.runner.paper import distinct
from research.runner.tuning import Pool, Trial
from trainer.federation.simulation import Device
from trainer.methods import RECOMMENDED, complete_options, make

# the paper's
METHODS = ("local", "fedavg", "fedprox", "fedper", "fedrep", "ditto", "fedala", "afedcl")
RELATIVES = ("fedbn", "scaffold", "fednova", "fenda")
PARTITIONS = ("disjoint", "dirichlet")


class Preset(NamedTuple):
    """How much of a grid is run."""

    size: int  # pixels
    rounds: int
    seeds: int
    samples: tuple[int, ...]  # training images of each node
    partitions: tuple[str, ...]
    methods: tuple[str, ...]
    others: tuple[str, ...] = ()  # that are tuned like them, and run in single settings
    learning_rate: float = 0.0  # of every method, none of which is tuned; 0: as tuned
    deal: str = "deck"  # of classes, where the partition is disjoint


PRESETS = {
    "quick": Preset(64, 10, 2, (10,), PARTITIONS[:1], METHODS),  # minutes
    "cpu": Preset(64, 30, 3, (10,), PARTITIONS, METHODS, RELATIVES),  # hours
    # its protocol
    "paper": Preset(64, 30, 3, (10, 5, 20), PARTITIONS, METHODS, learning_rate=1e-3, deal="random"),
    # its size, too
    "full": Preset(
        128, 200, 5, (10, 5, 20), PARTITIONS, METHODS, learning_rate=1e-3, deal="random"
    ),
}


class Plan(NamedTuple):
    """What the cells of a grid have in common."""

    preset: Preset
    images: Mapping[str, str]  # digests of the data sets that are there, by key of DATASETS
    model: str
    encoder: Callable[[str, int], str]  # (model, seed) -> digest of the first encoder
    backbones: tuple[str, ...]  # of which there are weights
    training: Training
    tuned: Mapping[str, Trial]  # by method; empty = defaults
    torch: str  # version
    device: Device = "cpu"

    def setting(
        self,
        dataset: str,
        partition: str,
        *,
        nodes: int = 5,
        samples: int = 10,
        classes_per_node: int = 0,
        pool: Pool = "report",
    ) -> Setting:
        """How a data set is shared."""
        if partition == "disjoint" and self.preset.deal != "deck":
            partition = f"disjoint,deal={self.preset.deal}"
        return Setting(
            dataset=DATASETS[dataset].name,
            images=self.images[dataset],
            partition=partition,
            nodes=nodes,
            samples=samples,
            classes_per_node=classes_per_node or DATASETS[dataset].classes_per_node,
            pool=pool,
        )

    def cells(
        self,
        settings: list[Setting],
        variants: list[tuple[str, dict[str, Option]]],
        models: tuple[str, ...] = (),
        seeds: int = 0,
    ) -> list[Cell]:
        """Every variant (method, options beside the tuned ones) in every setting, seed by seed."""
        return [
            self.cell(setting, method, self._trial(method, options), model, seed)
            for seed in range(seeds or self.preset.seeds)
            for setting in settings
            for model in models or (self.model,)
            for method, options in variants
        ]

    def _trial(self, method: str, options: Mapping[str, Option]) -> Trial:
        trial = self.tuned.get(method) or plain(method, self.training)
        return trial._replace(options=complete_options(method, {**trial.options, **options}))

    def cell(self, setting: Setting, method: str, trial: Trial, model: str, seed: int) -> Cell:
        """One federation."""
        return Cell(
            setting=setting,
            method=method,
            options=trial.options,
            model=model,
            weights=self.encoder(model, seed),
            size=self.preset.size,
            training=trial.training,
            rounds=self.preset.rounds,
            seed=seed,
            torch=self.torch,
            cuda=self.device == "cuda" or UNSET,
        )

    def disjoint(self) -> list[Setting]:
        """Ten images a node of each data set."""
        return [self.setting(dataset, "disjoint") for dataset in self.images]


def tune(plan: Plan) -> list[Cell]:
    """Every method's trials on images of the tuning pool: of one data set disjoint,
    of the next one Dirichlet.
    """
    places = [(dataset, PARTITIONS[number % 2]) for number, dataset in enumerate(plan.images)]
    if len(places) == 1:
        places += [(places[0][0], PARTITIONS[1])]
    return [
        plan.cell(plan.setting(*place, pool="tuning"), method, trial, plan.model, seed=0)
        for place in places
        for method in (*plan.preset.methods, *plan.preset.others)
        for trial in trials(method, plan.training)
    ]


def table2(plan: Plan) -> list[Cell]:
    """Table II: methods in all settings, with one number of images after the other."""
    settings = {
        samples: [
            plan.setting(dataset, partition, samples=samples)
            for dataset in plan.images
            for partition in plan.preset.partitions
        ]
        for samples in plan.preset.samples
    }
    variants: list[tuple[str, dict[str, Option]]] = [(method, {}) for method in plan.preset.methods]
    return [cell for each in settings.values() for cell in plan.cells(each, variants)]


_STARTS = ("global", "carry")


def fig4(plan: Plan) -> list[Cell]:
    """Fig. 4: with and without the adversarial update,
    for both readings of where an encoder starts a round.
    """
    readings: list[dict[str, Option]] = [
        {"start": start, **own} for start in _STARTS for own in ({}, {"lambda": 0.0})
    ]
    return plan.cells(plan.disjoint(), [("afedcl", reading) for reading in readings])


def fig5(plan: Plan) -> list[Cell]:
    """Fig. 5: L_D against A_k, for both readings of where an encoder starts a round."""
    settings = [
        plan.setting(dataset, partition)
        for dataset in plan.images
        for partition in plan.preset.partitions
    ]
    return plan.cells(settings, [("afedcl", {"start": start}) for start in _STARTS])


def fig7(plan: Plan) -> list[Cell]:
    """Fig. 7: features of four methods, of the first data set."""
    variants: list[tuple[str, dict[str, Option]]] = [
        (name, {}) for name in ("fedavg", "fedrep", "fedala", "afedcl")
    ]
    return [
        msgspec.structs.replace(cell, embed=True)
        for cell in plan.cells(plan.disjoint()[:1], variants, seeds=1)
    ]


def fig8(plan: Plan) -> list[Cell]:
    """Fig. 8: lambda of AFedCL and of Ditto."""
    return plan.cells(
        plan.disjoint(),
        [(method, {"lambda": lam}) for lam in (0.01, 0.1, 1.0) for method in ("ditto", "afedcl")],
    )


def fig9(plan: Plan) -> list[Cell]:
    """Fig. 9: networks, and numbers of nodes that share 50 images."""
    variants: list[tuple[str, dict[str, Option]]] = [
        (name, {}) for name in ("local", "fedavg", "afedcl")
    ]
    shared = [
        plan.setting(dataset, "disjoint", nodes=nodes, samples=50 // nodes)
        for dataset in plan.images
        for nodes in (2, 5, 10)
    ]
    cells = plan.cells(plan.disjoint(), variants, plan.backbones) + plan.cells(shared, variants)
    return distinct(cells)


def fig10(plan: Plan) -> list[Cell]:
    """Fig. 10: AFedCL, and without each of its parts."""
    parts: list[dict[str, Option]] = [{}, {"lambda": 0.0}, {"weights": "equal"}, {"fusion": "none"}]
    return plan.cells(plan.disjoint(), [("afedcl", part) for part in parts])


def joining(plan: Plan) -> list[Cell]:
    """Joining with six images a node: tuning pool, where the rule that deploys is chosen,
    then report pool.
    """
    pools: tuple[Pool, ...] = ("tuning", "report")
    return [
        cell
        for pool in pools
        for cell in plan.cells(
            [
                plan.setting(dataset, partition, samples=6, classes_per_node=3, pool=pool)
                for dataset in plan.images
                for partition in PARTITIONS
            ],
            [(method, {}) for method in ("local", "fedavg", "fedper", "afedcl")],
        )
    ]


def consensus(plan: Plan) -> list[Cell]:
    """Five images of three classes a node: training, the consensus head's one message, and both."""
    settings = [
        plan.setting(dataset, "disjoint", samples=5, classes_per_node=3) for dataset in plan.images
    ]
    trained = plan.cells(
        settings, [(method, {}) for method in ("local", "fedavg", "fedper", "afedcl")]
    )
    sums = plan.cells(
        settings, [("gaussian", {"dimensions": dimensions}) for dimensions in (0, 256)]
    )
    return [
        *trained,
        *(msgspec.structs.replace(cell, rounds=1) for cell in sums),
        *(
            msgspec.structs.replace(cell, head="statistics")
            for cell in trained
            if cell.method != "local"
        ),
    ]


# of `scarce`, beside sums and one place
BASELINES = ("local", "fedavg", "fedper", "afedcl", "fedrep", "fedala")
# after how many rounds of training `afedcl_plus` is judged too, in the first setting
_EARLIER = (3, 6)


def scarce(plan: Plan) -> list[Cell]:
    """Which method a plant with few images should take, seed by seed; and all images in one place.

    `afedcl_plus` trains for its own number of rounds, fewer than the others.
    """
    disjoint = [
        plan.setting(dataset, "disjoint", samples=samples, classes_per_node=classes)
        for classes in (3, 2)
        for samples in (5, 3, 10)
        for dataset in plan.images
    ]
    dirichlet = [
        plan.setting(dataset, "dirichlet", samples=count)
        for count in (5, 3, 10)
        for dataset in plan.images
    ]
    settings = [*disjoint[: len(dirichlet)], *dirichlet, *disjoint[len(dirichlet) :]]
    rounds = {"gaussian": 1, RECOMMENDED: make(RECOMMENDED, plan.training, {}).rounds}
    cells = plan.cells(settings, [(method, {}) for method in (*BASELINES, *rounds)])
    cells = [
        msgspec.structs.replace(cell, rounds=rounds.get(cell.method, cell.rounds)) for cell in cells
    ]
    pooled = [
        msgspec.structs.replace(cell, pooled=True) for cell in plan.cells(settings, [("local", {})])
    ]
    first = plan.cells(settings[: len(plan.images)], [(RECOMMENDED, {})])
    earlier = [msgspec.structs.replace(cell, rounds=count) for count in _EARLIER for cell in first]
    return sorted([*cells, *pooled, *earlier], key=lambda cell: cell.seed)


def around(plan: Plan) -> list[Cell]:
    """One setting of `scarce` with one thing changed at a time: images, classes, plants,
    pixels, encoder, method.
    """

    def settings(samples: int = 5, classes: int = 3, nodes: int = 5) -> list[Setting]:
        return [
            plan.setting(
                dataset, "disjoint", samples=samples, classes_per_node=classes, nodes=nodes
            )
            for dataset in plan.images
        ]

    rounds = {"gaussian": 1, RECOMMENDED: make(RECOMMENDED, plan.training, {}).rounds}
    variants: list[tuple[str, dict[str, Option]]] = [
        (method, {}) for method in ("local", "fedavg", *rounds)
    ]
    larger = plan._replace(preset=plan.preset._replace(size=2 * plan.preset.size))
    cells = [
        *plan.cells(
            settings(),
            [*variants, *((method, {}) for method in ("fedprox", "ditto", *plan.preset.others))],
        ),
        *plan.cells(settings(classes=4), variants),
        *plan.cells(settings(), variants, ("efficientnet_lite0",)),
        *plan.cells(settings(nodes=10), variants),
        *plan.cells(settings(samples=20), variants),
        *larger.cells(settings(), variants),
    ]
    cells = [
        msgspec.structs.replace(cell, rounds=rounds.get(cell.method, cell.rounds)) for cell in cells
    ]
    return sorted(cells, key=lambda cell: cell.seed)


def trained(plan: Plan) -> list[Cell]:
    """What training adds to one message, by five and by twenty images a node, on the tuning pool;
    and all images in one place, trained and as sums.
    """
    rounds = {"gaussian": 1, RECOMMENDED: make(RECOMMENDED, plan.training, {}).rounds}
    methods = ("gaussian", RECOMMENDED, "fedavg", "fedper", "afedcl", "local")
    cells = []
    for samples in (5, 20):
        settings = [
            plan.setting(
                dataset, partition, samples=samples, classes_per_node=classes, pool="tuning"
            )
            for partition, classes in (("disjoint", 3), ("dirichlet", 0))
            for dataset in plan.images
        ]
        separate = plan.cells(settings, [(method, {}) for method in methods])
        together = plan.cells(settings, [("gaussian", {}), ("local", {})])
        made = [*separate, *(msgspec.structs.replace(each, pooled=True) for each in together)]
        cells += sorted(made, key=lambda cell: cell.seed)
    return [
        msgspec.structs.replace(cell, rounds=rounds.get(cell.method, cell.rounds)) for cell in cells
    ]


CODEC: Codec = "int4"


def codecs(plan: Plan) -> list[Cell]:
    """Accuracy against bytes, with five images a node: methods without a codec and with it,
    and the one message.
    """
    settings = [
        plan.setting(dataset, "disjoint", samples=5, classes_per_node=3) for dataset in plan.images
    ]
    rounds = {"gaussian": 1, RECOMMENDED: make(RECOMMENDED, plan.training, {}).rounds}
    cells = plan.cells(settings, [(method, {}) for method in ("fedavg", *rounds)])
    cells = [
        msgspec.structs.replace(cell, rounds=rounds.get(cell.method, cell.rounds)) for cell in cells
    ]
    return [*cells, *(msgspec.structs.replace(cell, codec=CODEC) for cell in cells)]


EPSILONS = ("8", "3", "1")
_TRIED_RATES = (1e-4, 1e-3)  # of training with noise
# one step a round; at epsilon 8, with ten images, neither trial learnt anything
_STEPS, _RATE = 5, 1e-4


def private(plan: Plan) -> list[Cell]:
    """Accuracy against epsilon of one message of sums,
    with ten to ninety images of three classes a node.
    """
    cells = [
        msgspec.structs.replace(cell, rounds=1)
        for samples in (90, 30, 10)
        for cell in plan.cells(_three_classes(plan, samples), [("gaussian", {})])
    ]
    noisy = [
        msgspec.structs.replace(cell, privacy={"epsilon": each})
        for each in EPSILONS
        for cell in cells
    ]
    return sorted([*cells, *noisy], key=lambda cell: cell.seed)


def private_tune(plan: Plan) -> list[Cell]:
    """Learning rates of training with noise, on images of the tuning pool."""
    cells = plan.cells(_three_classes(plan, 10, "tuning"), [("fedavg", {})], seeds=1)
    return [_with_noise(cell, "8", _STEPS, rate) for rate in _TRIED_RATES for cell in cells]


def private_training(plan: Plan) -> list[Cell]:
    """Accuracy against epsilon of methods that train, with ten images of three classes a node."""
    rounds = {RECOMMENDED: make(RECOMMENDED, plan.training, {}).rounds}
    cells = plan.cells(_three_classes(plan, 10), [("fedavg", {}), (RECOMMENDED, {})])
    cells = [
        msgspec.structs.replace(cell, rounds=rounds.get(cell.method, cell.rounds)) for cell in cells
    ]
    noisy = [_with_noise(cell, epsilon, _STEPS, _RATE) for epsilon in EPSILONS for cell in cells]
    return sorted([*cells, *noisy], key=lambda cell: (cell.method == RECOMMENDED, cell.seed))


def _three_classes(plan: Plan, samples: int, pool: Pool = "report") -> list[Setting]:
    return [
        plan.setting(dataset, "disjoint", samples=samples, classes_per_node=3, pool=pool)
        for dataset in plan.images
    ]


def _with_noise(cell: Cell, epsilon: str, steps: int, rate: float) -> Cell:
    """The cell in a private federation, whose nodes take one step a round."""
    return msgspec.structs.replace(
        cell,
        privacy={"epsilon": epsilon},
        rounds=steps,
        options=complete_options(cell.method, {**cell.options, "epochs": 1}),
        training=msgspec.structs.replace(cell.training, learning_rate=rate),
    )


def factors(plan: Plan) -> list[Cell]:
    """One choice changed at a time, on images of the tuning pool,
    so that defaults may follow from it.
    """
    settings = [plan.setting(dataset, "disjoint", pool="tuning") for dataset in plan.images]
    changes = {"afedcl": COMMON + OWN, "fedper": COMMON, "local": COMMON}
    return [
        vary(plan.cell(setting, method, plain(method, plan.training), plan.model, seed), change)
        for seed in range(plan.preset.seeds)
        for setting in settings
        for method, each in changes.items()
        for change in each
    ]


GRIDS: dict[str, Callable[[Plan], list[Cell]]] = {
    each.__name__: each
    for each in (
        tune,
        table2,
        fig4,
        fig5,
        fig7,
        fig8,
        fig9,
        fig10,
        joining,
        consensus,
        scarce,
        around,
        trained,
        codecs,
        private,
        private_tune,
        private_training,
        factors,
    )
}
