"""Who takes part in the comparisons: frameworks with networks, and the names that tables and figures have for them."""

from collections.abc import Mapping
from typing import NamedTuple

from broker_config.protocol.messages import Option
from research.fedtfi.presets import SMALL, Preset


class Framework(NamedTuple):
    """How nodes learn together."""

    method: str
    options: Mapping[str, Option] = {}  # that make it what it is
    shares: bool = False  # whether nodes have some images in common
    stages: int = 1  # of training in a round, among which its epochs are divided


FRAMEWORKS = {
    "FedAvg": Framework("fedavg"),
    "FedProx": Framework("fedprox"),
    "FedNova": Framework("fednova"),
    "Data Sharing": Framework("fedavg", shares=True),
    "FedTFI": Framework("fedtfi"),
    "PFI": Framework("fedtfi", {"use": "mixed"}),  # the exchange alone: no triplets
    "FedPer": Framework("fedper"),
    "AFedCL": Framework("afedcl", stages=2),
}


class Contender(NamedTuple):
    """A framework and a network."""

    framework: str
    model: str
    options: tuple[tuple[str, Option], ...] = ()  # that an experiment adds; they are not tuned for


_BASELINES = ("Data Sharing", "FedProx", "FedNova", "FedAvg")  # in the order of Table 2


def table2(preset: Preset) -> dict[str, Contender]:
    """Table 2: frameworks with texture networks, and FedTFI."""
    heads = preset.models.heads
    others = {f"{name}, {head}": Contender(name, heads[head]) for name in _BASELINES for head in preset.heads}
    return {**others, "FedTFI": Contender("FedTFI", preset.models.whole)}


def _parts(preset: Preset) -> Preset:
    """For what a part is worth: only the small scale has networks without it, so all that are compared are small."""
    return preset._replace(models=SMALL, heads=tuple(SMALL.heads))


def table4(preset: Preset) -> dict[str, Contender]:
    """Table 4, its modules added in the paper's order; and what the exchange is worth where the others are there."""
    models = _parts(preset).models
    return {
        "none": Contender("FedAvg", models.maps),
        "PFI": Contender("PFI", models.maps),
        "PFI, TEL": Contender("FedTFI", models.tel),
        "TEL, MusTEN (no exchange)": Contender("FedAvg", models.whole),
        "PFI, TEL, MusTEN": Contender("FedTFI", models.whole),
    }


def frameworks(preset: Preset) -> dict[str, Contender]:
    """Figs. 6 to 8: frameworks with Deep-TEN, and FedTFI."""
    head = preset.models.heads[preset.heads[0]]
    return {
        **{name: Contender(name, head) for name in _BASELINES[::-1]},
        "FedTFI": Contender("FedTFI", preset.models.whole),
    }


def without_musten(preset: Preset) -> dict[str, Contender]:
    """Fig. 10a: the same, FedTFI without MusTEN."""
    small = _parts(preset)
    return {**frameworks(small), "FedTFI": Contender("FedTFI", small.models.tel)}


def heads(preset: Preset) -> dict[str, Contender]:
    """Fig. 10b: PFI and TEL with several heads."""
    models = _parts(preset).models
    exchanged = {head: Contender("FedTFI", model) for head, model in models.exchanged.items()}
    return {**exchanged, "MusTEN": Contender("FedTFI", models.whole)}


def fig10(preset: Preset) -> dict[str, Contender]:
    """Both."""
    return {**without_musten(preset), **heads(preset)}


def embedded(preset: Preset) -> dict[str, Contender]:
    """Fig. 9: with TEL and without it."""
    models = _parts(preset).models
    return {"with TEL": Contender("FedTFI", models.whole), "without TEL": Contender("PFI", models.musten)}


def personal(preset: Preset) -> dict[str, Contender]:
    """Models of nodes' own, on FedTFI's network."""
    return {name: Contender(name, preset.models.whole) for name in ("FedAvg", "FedTFI", "FedPer", "AFedCL")}


def protected(preset: Preset) -> dict[str, Contender]:
    """FedTFI whose patches are protected, between none at all and unprotected ones."""
    whole = preset.models.whole
    ways = [{"noise": noise} for noise in (0.5, 1.0, 2.0)] + [{"levels": levels} for levels in (8, 4, 2)]
    ways += [{"mix": 2}, {"mix": 4}, {"noise": 0.5, "levels": 4, "mix": 4}]
    named = {" ".join(f"{name} {value:g}" for name, value in way.items()): tuple(way.items()) for way in ways}
    return {
        "as they are": Contender("FedTFI", whole),
        **{name: Contender("FedTFI", whole, options) for name, options in named.items()},
        "no exchange": Contender("FedAvg", whole),
    }


def everyone(preset: Preset) -> list[Contender]:
    """All that are compared, each once: what is tuned."""
    groups = (table2, table4, fig10, embedded, personal)
    return list(dict.fromkeys(who for group in groups for who in group(preset).values()))
