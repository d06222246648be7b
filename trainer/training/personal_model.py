"""The personal model as a node leaves it on its own disk, to be exported: tensors and what they mean."""

import importlib.metadata
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Digest, Manifest, Option, Preprocessing, Round, Spec, Training
from broker_config.storage import disk
from trainer.models.network import Tensors

_NAMED = 5  # folders that an error proposes
_TENSORS, _FACTS = "personal.safetensors", "personal.json"
_VERDICTS, _TRAINING = "verdicts.json", "training.json"
_List = TypeVar("_List")
_SOFTWARE = ("edge-node", "torch", "onnxruntime")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a personal model comes from and what it expects."""

    federation: str
    run: str
    round: Round
    node: str
    method: str
    options: dict[str, Option]
    model: str
    classes: Annotated[tuple[str, ...], msgspec.Meta(min_length=2)]
    preprocessing: Preprocessing
    training: Training
    rounds: Round
    seed: int
    trained: dict[str, int]  # training images of each of the node's own classes
    software: dict[str, str]  # versions
    created: str  # ISO 8601, UTC
    metrics: dict[str, float]  # on held-out images
    history: tuple[dict[str, float], ...] = ()  # of each round
    broadcast: Manifest | None = None  # that the model was made from, as its coordinator has signed it

    @staticmethod
    def of(
        spec: Spec,
        node: str,
        round_: int,
        trained: dict[str, int],
        metrics: dict[str, float],
        history: tuple[dict[str, float], ...],
    ) -> "Facts":
        """The facts of a node's model in the federation `spec`."""
        return Facts(
            federation=spec.federation,
            run=spec.run,
            round=round_,
            node=node,
            method=spec.method,
            options=spec.options,
            model=spec.model,
            classes=spec.classes,
            preprocessing=spec.preprocessing,
            training=spec.training,
            rounds=spec.rounds,
            seed=spec.seed,
            trained=trained,
            software={name: importlib.metadata.version(name) for name in _SOFTWARE},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            metrics=metrics,
            history=history,
        )


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said of an image that did not train it. Stays on this disk, as the image does."""

    path: str  # absolute
    digest: Digest  # of the file's bytes
    label: str
    verdict: str
    confidence: float  # probability of the verdict


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """An image that trained the model. Stays on this disk, as the image does."""

    path: str  # absolute
    digest: Digest  # of the file's bytes
    label: str


class Personal(NamedTuple):
    """A personal model."""

    facts: Facts
    tensors: Tensors
    verdicts: tuple[Verdict, ...] = ()
    training: tuple[Sample, ...] = ()


def save(personal: Personal, folder: Path) -> None:
    """Write a personal model into `folder`. EdgeNodeError if the disk does not take it."""
    tensors = {name: value.contiguous() for name, value in personal.tensors.items()}
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        disk.replace(folder / _TENSORS, partial(save_file, tensors))
        for name, told in ((_VERDICTS, personal.verdicts), (_TRAINING, personal.training), (_FACTS, personal.facts)):
            disk.replace_bytes(folder / name, msgspec.json.format(msgspec.json.encode(told)))


def load(folder: Path) -> Personal:
    """Read a personal model, without the lists of its images: `load_verdicts` and `load_training` read those.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    facts = load_facts(folder)
    try:
        return Personal(facts, load_file(folder / _TENSORS))
    except (FileNotFoundError, SafetensorError) as error:
        raise UsageError(f"the personal model in {folder} is damaged ({error})", "copy the folder again") from error


def load_facts(folder: Path) -> Facts:
    """Read what a personal model is, without its tensors. Raises UsageError as `load` does."""
    try:
        return msgspec.json.decode((folder / _FACTS).read_bytes(), type=Facts)
    except (FileNotFoundError, NotADirectoryError) as error:
        inside = sorted(str(path.parent) for depth in ("model", "*/model") for path in folder.glob(f"{depth}/{_FACTS}"))
        raise UsageError(
            f"there is no personal model in {folder} ({_FACTS} is missing)",
            f"did you mean {' '.join(inside[:_NAMED])}?"
            if inside
            else "pass the model folder that edge-node join or simulate left",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the personal model in {folder} is damaged ({error})", "copy the folder again") from error


def load_verdicts(folder: Path) -> tuple[Verdict, ...]:
    """Read what a personal model said of the images that judged it.

    Raises:
        UsageError: they are missing or damaged.
    """
    return _load_list(folder, _VERDICTS, tuple[Verdict, ...])


def load_training(folder: Path) -> tuple[Sample, ...]:
    """Read which images trained a personal model.

    Raises:
        UsageError: the list is missing or damaged.
    """
    return _load_list(folder, _TRAINING, tuple[Sample, ...])


def _load_list(folder: Path, name: str, kind: type[_List]) -> _List:
    try:
        return msgspec.json.decode((folder / name).read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{name} beside the personal model in {folder} cannot be read ({error})",
            "copy the folder again, or let the run be repeated with this version",
        ) from error


def describe(facts: Facts) -> str:
    """What the model reaches, as a sentence."""
    found = facts.metrics
    how = "cross-validated on" if found["cross_validated"] else "on"
    return (
        f"accuracy {found['accuracy']:.1%} ({found['accuracy_low']:.0%} to {found['accuracy_high']:.0%}, 95 % interval)"
        f" {how} {found['images']:.0f} {'' if found['cross_validated'] else 'held-out '}images"
    )
