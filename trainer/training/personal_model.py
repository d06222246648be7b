"""Personal models on a node's disk, ready for export: tensors, metadata,
and the images behind them.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import (
    Aggregation,
    ClassName,
    Digest,
    Head,
    Manifest,
    Option,
    Preprocessing,
    Round,
    Spec,
    Training,
)
from broker_config.storage import checksums, disk
from edge.bundle.bundle_format import PERSONAL_MODEL as METADATA
from edge.bundle.bundle_format import Confidence, PrivacySpent
from edge.bundle.comparison import Comparison
from trainer.data.image_groups import UNGROUPED
from trainer.methods import PREVIEW, RECOMMENDED
from trainer.models.catalogue import FEATURES
from trainer.models.named_tensors import select
from trainer.models.network import Tensors
from trainer.privacy.epsilon import DELTA
from trainer.training import model_folder

_TENSORS = "personal.safetensors"
_SHARED = "shared.safetensors"
_PREDICTIONS = "verdicts.json"
_TRAINING = "training.json"
_List = TypeVar("_List")
_SOFTWARE = ("edge-node", "torch", "onnxruntime")


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Origin and expected input of a personal model, and the accuracy that it reaches."""

    federation: str
    run: str
    round: Round
    node: str
    method: str
    options: dict[str, Option]
    model: str
    classes: Annotated[tuple[ClassName, ...], msgspec.Meta(min_length=2)]
    preprocessing: Preprocessing
    training: Training
    rounds: Round
    seed: int
    trained: dict[str, int]  # training images of each of the node's own classes
    software: dict[str, str]  # versions
    created: str  # ISO 8601, UTC
    metrics: dict[str, float]  # on held-out images
    history: tuple[dict[str, float], ...] = ()  # of each round
    # with training alone; None where that is all the method does
    comparison: Comparison | None = None
    broadcast: Manifest | None = None  # from which the model was made, as signed by the coordinator
    head: Head = "trained"
    threads: int = 1  # of each training process
    # classes of the federation, where some were taken out of the model
    federated: tuple[str, ...] = ()
    nodes: int = 0  # that the run expected; 0: unknown, as in models of older versions
    quorum: int = 0  # likewise
    aggregation: Aggregation | None = None  # likewise
    privacy: PrivacySpent | None = None  # None if the federation was not private
    # on images that the model has not seen; None in models of older versions, or without any
    confidence: Confidence | None = None
    refits: int = 0  # how often it was made anew since the last round

    @staticmethod
    def from_spec(
        spec: Spec,
        node: str,
        round_: int,
        trained: dict[str, int],
        metrics: dict[str, float],
        history: tuple[dict[str, float], ...],
        comparison: Comparison | None = None,
        epsilon: float = 0.0,
        confidence: Confidence | None = None,
    ) -> "ModelMetadata":
        """Return the metadata of a node's model, trained in the federation `spec`.

        A private federation has spent `epsilon`.
        """
        privacy = (
            PrivacySpent(epsilon=epsilon, delta=DELTA, settings=spec.privacy)
            if spec.privacy
            else None
        )
        return ModelMetadata(
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
            comparison=comparison,
            head=spec.head,
            threads=spec.threads,
            nodes=spec.nodes,
            quorum=spec.quorum,
            aggregation=spec.aggregation,
            privacy=privacy,
            confidence=confidence,
        )


class HeldOutPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The class predicted for an image that the model was not trained on.

    Stays on this disk, as the image does.
    """

    path: str  # absolute
    digest: Digest  # of the file's bytes
    label: str
    verdict: str
    confidence: float  # probability of the verdict
    # distance to the nearest class, by a head that has not seen the image, if that tells
    novelty: float | None = None


class TrainingImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that the model was trained on. Stays on this disk, as the image does."""

    path: str  # absolute
    digest: Digest  # of the file's bytes
    label: str


class PersonalModel(NamedTuple):
    """A personal model."""

    metadata: ModelMetadata
    tensors: Tensors
    predictions: tuple[HeldOutPrediction, ...] = ()
    training_images: tuple[TrainingImage, ...] = ()
    # Of a head of statistics: the encoder, and the totals of the other plants. With them it can be
    # made anew.
    shared: Tensors = {}  # noqa: RUF012  (replaced, never changed)

    def on_cpu(self) -> "PersonalModel":
        """The same, with tensors that need no GPU."""
        collected_on_cpu = []
        for each in (self.tensors, self.shared):
            collected_on_cpu.append({name: value.cpu() for name, value in each.items()})
        tensors, shared = collected_on_cpu
        return self._replace(tensors=tensors, shared=shared)


def save(personal: PersonalModel, folder: Path) -> None:
    """Write a personal model into `folder`. EdgeNodeError if the disk fails."""
    tensors = {name: value.contiguous() for name, value in personal.tensors.items()}
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METADATA, checksums.SUMS):  # of an earlier model: never half of each
            (folder / name).unlink(missing_ok=True)
        disk.replace(folder / _TENSORS, partial(save_file, tensors))
        if personal.shared:
            own = {
                name: value
                for name, value in personal.shared.items()
                if not _is_same(value, tensors.get(name))
            }
            disk.replace(folder / _SHARED, partial(save_file, own))
        for name, content in (
            (_PREDICTIONS, personal.predictions),
            (_TRAINING, personal.training_images),
            (METADATA, personal.metadata),
        ):
            disk.replace_bytes(folder / name, msgspec.json.format(msgspec.json.encode(content)))
        shared_file = [_SHARED] if personal.shared else []
        written = (
            _TENSORS,
            _PREDICTIONS,
            _TRAINING,
            METADATA,
            *shared_file,
        )
        sums = checksums.sums({name: checksums.digest_of(folder / name) for name in written})
        disk.replace_bytes(folder / checksums.SUMS, sums)


def load(folder: Path) -> PersonalModel:
    """Read a personal model without the lists of its images,
    which `load_predictions` and `load_training_images` read.

    Raises:
        UsageError: there is none, it is damaged, or its encoder is not installed here.
    """
    metadata = load_metadata(folder)
    if metadata.model not in FEATURES:
        raise UsageError(
            f"the personal model in {folder} has an encoder that is not installed here: "
            f"{metadata.model!r}",
            "install the package that brings it",
        )
    with _noticing_damage(folder):
        checksums.verify(folder, _TENSORS)
        return PersonalModel(metadata, load_file(folder / _TENSORS))


def load_shared(personal: PersonalModel, folder: Path) -> Tensors:
    """Read `shared` of the model that `load` has read from `folder`.

    Raises:
        UsageError: it has none, or it is damaged.
    """
    if not has_shared(folder):
        raise UsageError(
            f"the personal model in {folder} has no head of statistics ({_SHARED} is missing)",
            f"pass a model of --method {PREVIEW} or {RECOMMENDED}, or of --head statistics",
        )
    with _noticing_damage(folder):
        checksums.verify(folder, _SHARED)
        return {**select(personal.tensors, ("encoder",)), **load_file(folder / _SHARED)}


def has_shared(folder: Path) -> bool:
    """Whether the personal model in `folder` has a head of statistics."""
    return checksums.lists(folder, _SHARED) or (folder / _SHARED).exists()


def _is_same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(one, other)


def load_metadata(folder: Path) -> ModelMetadata:
    """Read a personal model's metadata, without its tensors. Raises UsageError as `load` does."""
    model_folder.check(folder)
    with _noticing_damage(folder):
        checksums.verify(folder, METADATA)
        return msgspec.json.decode(disk.read_regular(folder / METADATA), type=ModelMetadata)


@contextlib.contextmanager
def _noticing_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except (
        OSError,
        SafetensorError,
        checksums.DamagedError,
        msgspec.DecodeError,
        UnicodeDecodeError,
    ) as error:
        raise UsageError(
            f"the personal model in {folder} is damaged ({error})", "copy the folder again"
        ) from error


def load_predictions(folder: Path) -> tuple[HeldOutPrediction, ...]:
    """Read the predictions on the images that a personal model was evaluated on.

    Raises:
        UsageError: they are missing or damaged.
    """
    return _load_list(folder, _PREDICTIONS, tuple[HeldOutPrediction, ...])


def load_training_images(folder: Path) -> tuple[TrainingImage, ...]:
    """Read the list of images that a personal model was trained on.

    Raises:
        UsageError: the list is missing or damaged.
    """
    return _load_list(folder, _TRAINING, tuple[TrainingImage, ...])


def _load_list(folder: Path, name: str, kind: type[_List]) -> _List:
    try:
        checksums.verify(folder, name)
        return msgspec.json.decode(disk.read_regular(folder / name), type=kind)
    except (
        OSError,
        checksums.DamagedError,
        msgspec.DecodeError,
        UnicodeDecodeError,
    ) as error:
        raise UsageError(
            f"{name} beside the personal model in {folder} cannot be read ({error})",
            "copy the folder again, or let the run be repeated with this version",
        ) from error


def format_outcome(metadata: ModelMetadata) -> list[str]:
    """The model's accuracy, what joining was worth, and warnings: a sentence each."""
    metrics = metadata.metrics
    comparison = metadata.comparison
    if not metrics and metadata.trained:
        return [
            "nothing is known of its accuracy here: this plant has too few labelled images to "
            "judge it; label images of a second spot of each class"
        ]
    if not metrics:
        return [
            "nothing is known of its accuracy here: this plant has no labelled image; the model "
            "is made of what all others know, and to the line all classes are alike"
        ]
    spent = [format_spent(metadata.privacy)] if metadata.privacy else []
    images = f"{metrics['images']:.0f} held-out images"
    if metrics["cross_validated"]:
        images = f"{metrics['images']:.0f} images, each left out in turn"
    accuracy = (
        f"accuracy {metrics['accuracy']:.1%} ({metrics['accuracy_low']:.0%} to "
        f"{metrics['accuracy_high']:.0%}, 95 % interval) on {images}, as a line judges; "
        f"{metrics['accuracy_all']:.1%} if all {len(metadata.classes)} classes count alike"
    )
    compared: list[str] = []
    if comparison:
        gain = [comparison.training.describe()] if comparison.training else []
        compared = [comparison.describe(), *gain, *comparison.warnings()]
    ungrouped = [UNGROUPED] if metrics.get("groups") == metrics["images"] else []
    return [accuracy, *ungrouped, *spent, *compared]


def format_spent(spent: PrivacySpent) -> str:
    """What of the privacy of a plant's images is spent, in a sentence."""
    return (
        f"what has left this plant spent epsilon {spent.epsilon:.3g} of each training image, at "
        f"delta {spent.delta:g}; the model itself knows them as they are, and stays here"
    )
