"""Frameworks with networks that are compared,
and the names that tables and figures have for them.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import UNSET, UnsetType

from broker_config.protocol.messages import Option
from research.fedtfi.presets import SMALL, Preset


class Framework(NamedTuple):
    """A federated method, and what makes a framework of it."""

    method: str
    options: Mapping[str, Option] = {}
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


class Variant(NamedTuple):
    """A framework and a network."""

    framework: str
    model: str
    options: tuple[tuple[str, Option], ...] = ()  # that an experiment adds; they are not tuned for
    head: Literal["statistics"] | UnsetType = UNSET  # likewise; as a cell has it

    @property
    def tuned(self) -> "Variant":
        """Whose trials it takes."""
        return Variant(self.framework, self.model)


_BASELINES = ("Data Sharing", "FedProx", "FedNova", "FedAvg")  # in the order of Table 2


def table2(preset: Preset) -> dict[str, Variant]:
    """Table 2: frameworks with texture networks, and FedTFI."""
    heads = preset.models.heads
    others = {
        f"{name}, {head}": Variant(name, heads[head])
        for name in _BASELINES
        for head in preset.heads
    }
    return {**others, "FedTFI": Variant("FedTFI", preset.models.whole)}


def _parts(preset: Preset) -> Preset:
    """For what a part is worth: only the small scale has networks without it,
    so all that are compared are small.
    """
    return preset._replace(models=SMALL, heads=tuple(SMALL.heads))


def table4(preset: Preset) -> dict[str, Variant]:
    """Table 4, its modules added in the paper's order;
    and what the exchange is worth where the others are there.
    """
    models = _parts(preset).models
    return {
        "none": Variant("FedAvg", models.maps),
        "PFI": Variant("PFI", models.maps),
        "PFI, TEL": Variant("FedTFI", models.tel),
        "TEL, MusTEN (no exchange)": Variant("FedAvg", models.whole),
        "PFI, TEL, MusTEN": Variant("FedTFI", models.whole),
    }


def frameworks(preset: Preset) -> dict[str, Variant]:
    """Figs. 6 to 8: frameworks with Deep-TEN, and FedTFI."""
    head = preset.models.heads[preset.heads[0]]
    return {
        **{name: Variant(name, head) for name in _BASELINES[::-1]},
        "FedTFI": Variant("FedTFI", preset.models.whole),
    }


def without_musten(preset: Preset) -> dict[str, Variant]:
    """Fig. 10a: the same, FedTFI without MusTEN."""
    small = _parts(preset)
    return {**frameworks(small), "FedTFI": Variant("FedTFI", small.models.tel)}


def heads(preset: Preset) -> dict[str, Variant]:
    """Fig. 10b: PFI and TEL with several heads."""
    models = _parts(preset).models
    exchanged = {head: Variant("FedTFI", model) for head, model in models.exchanged.items()}
    return {**exchanged, "MusTEN": Variant("FedTFI", models.whole)}


def fig10(preset: Preset) -> dict[str, Variant]:
    """Fig. 10: both parts."""
    return {**without_musten(preset), **heads(preset)}


def embedded(preset: Preset) -> dict[str, Variant]:
    """Fig. 9: with TEL and without it."""
    models = _parts(preset).models
    return {
        "with TEL": Variant("FedTFI", models.whole),
        "without TEL": Variant("PFI", models.musten),
    }


def personal(preset: Preset) -> dict[str, Variant]:
    """Models of nodes' own, on FedTFI's network."""
    return {
        name: Variant(name, preset.models.whole)
        for name in ("FedAvg", "FedTFI", "FedPer", "AFedCL")
    }


def protected(preset: Preset) -> dict[str, Variant]:
    """FedTFI whose patches are protected, between none at all and unprotected ones."""
    whole = preset.models.whole
    ways = [{"noise": noise} for noise in (0.5, 1.0, 2.0)] + [
        {"levels": levels} for levels in (8, 4, 2)
    ]
    ways += [{"mix": 2}, {"mix": 4}, {"noise": 0.5, "levels": 4, "mix": 4}]
    named = {
        " ".join(f"{name} {value:g}" for name, value in way.items()): tuple(way.items())
        for way in ways
    }
    return {
        "as they are": Variant("FedTFI", whole),
        **{name: Variant("FedTFI", whole, options) for name, options in named.items()},
        "no exchange": Variant("FedAvg", whole),
    }


def negatives(preset: Preset) -> dict[str, Variant]:
    """Both readings of a triplet's negative; as other images' tokens may lie far apart,
    with a wider margin, too.
    """
    whole = preset.models.whole
    return {
        "the same image with patches of another label": Variant("FedTFI", whole),
        "another image": Variant("FedTFI", whole, (("use", "samples"),)),
        "another image, margin 10": Variant(
            "FedTFI", whole, (("use", "samples"), ("margin", 10.0))
        ),
    }


def consensus(preset: Preset) -> dict[str, Variant]:
    """Data Sharing and FedTFI, and the network without an exchange: the trained classifier,
    or the consensus head.
    """
    compared = frameworks(preset)
    trained = {
        "Data Sharing": compared["Data Sharing"],
        "FedAvg, FedTFI's network": Variant("FedAvg", preset.models.whole),
        "FedTFI": compared["FedTFI"],
    }
    return trained | {
        f"{name}, consensus head": each._replace(head="statistics")
        for name, each in trained.items()
    }


def tuned(preset: Preset) -> list[Variant]:
    """All that are tuned, each once."""
    groups = (table2, table4, fig10, embedded, personal)
    return list(dict.fromkeys(variant for group in groups for variant in group(preset).values()))
