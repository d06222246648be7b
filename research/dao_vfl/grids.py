"""Grids: the vertical federations of each figure of the paper (Wang et al., 2025)."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from edge_node.extensions.vfl.messages import Channel, Denoising
from research.dao_vfl.cell import Cell
from research.dao_vfl.data import Split
from research.dao_vfl.presets import ETAS, WORTH, Study
from research.dao_vfl.run import AGENT
from research.runner.panels import Entry
from research.runner.tuning import Pool

_SILENT = Denoising()
_CLEAN = {"channel": Channel(), "denoising": _SILENT}
NE, NI, DENOISED = "noise excluded (NE)", "noise included (NI)", "denoised"
CENTRAL, FIXED = "centralised", "best fixed model (proxy)"
_RULES = {"all": "HO (all take the most)", "one": "HE (one takes the most)"}
_RULES |= {"deadline": "deadline rule", "proportional": "proportional rule"}
_DECISIONS = {
    2: ((1, 1), (2, 2), (3, 3), (5, 5), (10, 10), (5, 1), (1, 5), (10, 1), (1, 10), (3, 7), (6, 2)),
    4: (
        (1, 1, 1, 1),
        (2, 2, 2, 2),
        (3, 3, 3, 3),
        (5, 5, 5, 5),
        (3, 1, 1, 1),
        (5, 1, 1, 1),
        (1, 1, 1, 5),
        (5, 5, 1, 1),
        (2, 3, 4, 5),
    ),
}
"""Local iterations that stay the same, by the number of sensors."""


class Plan(NamedTuple):
    """What the cells of a grid have in common."""

    studies: Mapping[str, Study]  # of the data sets that are there
    digests: Mapping[str, str]  # of these
    torch: str  # version
    # digests of trained policies by number of sensors and E_max
    agents: Mapping[tuple[int, int], str] = {}

    def entries(
        self, variants: Callable[[Study], Mapping[str, Mapping[str, Any]]], pool: Pool = "report"
    ) -> list[Entry[Cell]]:
        """Every variant (what it changes in the base, by name) on every data set, seed by seed."""
        return [
            Entry(name, data, "", msgspec.structs.replace(self.base(data, seed, pool), **changes))
            for seed in range(max((study.seeds for study in self.studies.values()), default=0))
            for data, study in self.studies.items()
            if seed < study.seeds
            for name, changes in variants(study).items()
        ]

    def base(self, data: str, seed: int, pool: Pool = "report") -> Cell:
        """The federation with a denoiser."""
        study = self.studies[data]
        return Cell(
            split=Split(data=data, digest=self.digests[data], pool=pool, order=study.order),
            network=study.network,
            window=study.window,
            recipe=study.recipe,
            channel=study.channel,
            denoising=study.denoising,
            iterations=(study.equal,) * study.sensors,
            rounds=study.rounds,
            every=study.every,
            seed=seed,
            torch=self.torch,
        )


def tune(plan: Plan) -> list[Entry[Cell]]:
    """The step of gradient descent, on products held out of the training file."""

    def variants(study: Study) -> dict[str, Mapping[str, Any]]:
        return {
            f"{name}, eta {eta:g}": {
                "recipe": msgspec.structs.replace(study.recipe, eta=eta),
                **noise,
            }
            for name, noise in ((NE, _CLEAN), (NI, {"denoising": _SILENT}), (DENOISED, {}))
            for eta in ETAS
        }

    return plan.entries(variants, pool="tuning")


def fig4(plan: Plan) -> list[Entry[Cell]]:
    """Fig. 4: equal and unequal numbers of local iterations whose sum is the same."""

    def variants(study: Study) -> dict[str, Mapping[str, Any]]:
        unequal = {
            f"HE, E = {', '.join(map(str, each))}": {"iterations": each} for each in study.unequal
        }
        return {f"HO, E = {study.equal} each": {}, **unequal}

    return plan.entries(variants)


def fig6(plan: Plan) -> list[Entry[Cell]]:
    """Fig. 6: without noise, with noise, and denoised in four ways.

    Two copies that are rounded to the nearest level are the same: Noise2Noise is for a channel with
    dither.
    """

    def variants(study: Study) -> dict[str, Mapping[str, Any]]:
        replace = msgspec.structs.replace
        return {
            NE: _CLEAN,
            NI: {"denoising": _SILENT},
            f"{DENOISED}, one autoencoder": {},
            f"{DENOISED}, it learns in every round": _learning(study, study.rounds),
            f"{DENOISED}, one a sensor": {"denoising": replace(study.denoising, shared=False)},
            f"{DENOISED}, Noise2Noise, dither": {
                "channel": replace(study.channel, dither=True),
                "denoising": replace(study.denoising, target="noisy"),
            },
        }

    return plan.entries(variants)


def fig7(plan: Plan) -> list[Entry[Cell]]:
    """Fig. 7: rounds in which the denoiser learns; beside the paper's, all of them."""

    def variants(study: Study) -> dict[str, Mapping[str, Any]]:
        longest = study.denoising.rounds
        lengths = (longest, 3 * longest // 4, longest // 2, study.rounds)
        return {f"T_dl = {rounds}": _learning(study, rounds) for rounds in lengths}

    return plan.entries(variants)


def fig8(plan: Plan) -> list[Entry[Cell]]:
    """Fig. 8: who decides local iterations; timings are simulated.

    The head takes as many as the busiest sensor, which favours HE: beside it HO and HE with a head
    that takes its own.
    """

    def variants(study: Study) -> dict[str, Mapping[str, Any]]:
        found = _policies(plan)(study)
        own = {
            f"{name[:2]}, the head takes {study.equal}": name
            for name in (_RULES["all"], _RULES["one"])
        }
        return found | {
            name: {**found[rule], "head_iterations": study.equal} for name, rule in own.items()
        }

    return plan.entries(variants)


def fig9(plan: Plan) -> list[Entry[Cell]]:
    """Fig. 9: latency of the rounds of Fig. 8."""
    return plan.entries(_policies(plan))


def fig10(plan: Plan) -> list[Entry[Cell]]:
    """Fig. 10: reward, whose accuracy is measured after each round on products held out of the
    training file.

    Only of data sets for which it is known what accuracy is worth.
    """
    plan = plan._replace(studies=valued(plan.studies))
    return [
        entry._replace(cell=msgspec.structs.replace(entry.cell, every=1))
        for entry in plan.entries(_policies(plan), pool="tuning")
    ]


def curve(plan: Plan) -> list[Entry[Cell]]:
    """Learning under decisions that stay the same,
    which the surrogate that agents learn from is fitted to.
    """

    def variants(study: Study) -> dict[str, Mapping[str, Any]]:
        return {
            f"E = {', '.join(map(str, each))}": {"iterations": each, "every": 1}
            for each in _DECISIONS[study.sensors]
        }

    return plan.entries(variants, pool="tuning")


def regret(plan: Plan) -> list[Entry[Cell]]:
    """Cumulative loss beyond that of a model which knew all products beforehand."""

    def variants(study: Study) -> dict[str, Mapping[str, Any]]:
        return {
            NE: _CLEAN,
            NI: {"denoising": _SILENT},
            DENOISED: {},
            f"{DENOISED}, it learns in every round": _learning(study, study.rounds),
            FIXED: {"kind": "offline", **_CLEAN},
        }

    return plan.entries(variants)


def central(plan: Plan) -> list[Entry[Cell]]:
    """The federation beside one model that has all data at one place: the same network,
    sets and number of steps.
    """
    return plan.entries(
        lambda _: {CENTRAL: {"kind": "central", **_CLEAN}, NE: _CLEAN, DENOISED: {}}
    )


def valued(studies: Mapping[str, Study]) -> dict[str, Study]:
    """Those for which it is known what accuracy is worth: they have rewards, and agents."""
    return {name: study for name, study in studies.items() if (name, study.recipe.batches) in WORTH}


def _learning(study: Study, rounds: int) -> dict[str, Any]:
    """A denoiser that learns in so many of the first rounds."""
    return {"denoising": msgspec.structs.replace(study.denoising, rounds=rounds)}


def _policies(plan: Plan) -> Callable[[Study], dict[str, Mapping[str, Any]]]:
    def variants(study: Study) -> dict[str, Mapping[str, Any]]:
        most = (study.most,) * study.sensors
        names = dict(_RULES)
        if digest := plan.agents.get((study.sensors, study.most)):
            names[AGENT + digest] = "PPO"
        return {name: {"policy": policy, "iterations": most} for policy, name in names.items()}

    return variants


GRIDS: dict[str, Callable[[Plan], list[Entry[Cell]]]] = {
    each.__name__: each
    for each in (tune, fig4, fig6, fig7, fig8, fig9, fig10, curve, regret, central)
}
