"""A head of statistics made anew with a plant's images as they are now,
without a network and without training.
"""

from collections.abc import Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from broker_config.protocol.errors import UsageError, suggest
from broker_config.protocol.messages import Spec
from edge.bundle.bundle_format import Confidence, HeldOut
from trainer.data.checks.check_run import load_checked
from trainer.data.class_folders import HoldOut, Images, LabelledImages, make_catalogue
from trainer.data.class_names import check_own_aliases
from trainer.data.folder_scan import scan_folder
from trainer.data.image_groups import read_keys
from trainer.methods import make
from trainer.models.catalogue import FEATURES
from trainer.models.initial_weights import Shape
from trainer.models.network import Tensors, to_arrays
from trainer.training import personal_model
from trainer.training.conclusion import conclude
from trainer.training.participant import Participant, State
from trainer.training.personal_model import (
    HeldOutPrediction,
    ModelMetadata,
    PersonalModel,
    TrainingImage,
)


class Refitted(NamedTuple):
    """A personal model made anew, and what to tell of it, a sentence each."""

    model: PersonalModel
    notes: list[str]


def refit(
    source: Path,
    folder: Path,
    test: Path | None = None,
    *,
    group: str | None = None,
    aliases: Mapping[str, str] = {},
    without: Sequence[str] = (),
) -> Refitted:
    """The personal model that the node would have, had its images always been those in `folder`.

    The other plants' totals and the encoder are those of the model in `source`. In folders whose
    names are no classes, images have the class that the model had for them. Images that the model
    in `source` held out stay so, and new ones train.

    Args:
        source: folder of a personal model with a head of statistics.
        folder: class folders with this plant's images.
        test: class folders with held-out images, or None.
        group: which images train or are held out together beside look-alikes, as `read_keys` takes
            it.
        aliases: from the name of a folder to a class of the federation.
        without: classes that the model shall never name. Their images are not used.

    Raises:
        UsageError: the model has no such head, there is no such class, or what is wrong with the
            images.
        EdgeNodeError: no plants can have such totals.
    """
    before = personal_model.load(source)
    shared = personal_model.load_shared(before, source)
    metadata = before.metadata
    spec = _spec_of(metadata, shared)
    for name in without:
        if name not in spec.classes:
            raise UsageError(f"the federation has no class {name!r}", suggest(name, spec.classes))
    kept = tuple(name for name in spec.classes if name not in without)
    if len(kept) < 2:
        raise UsageError(
            f"a model needs two classes, and {', '.join(kept) or 'none'} is left", "keep one more"
        )
    images = _read_images(spec, source, folder, test, group, aliases, without)
    participant = Participant(
        spec, metadata.node, images, without=[spec.classes.index(name) for name in without]
    )
    result = to_arrays(shared)
    model = conclude(
        participant, State({}, {}), metadata.round, result, result, (), None, counted=False
    )
    rows = [spec.classes.index(name) for name in kept]
    tensors = model.tensors | {
        name: model.tensors[name][rows] for name in ("classifier.weight", "classifier.bias")
    }
    federated = spec.classes if without else ()
    changed = msgspec.structs.replace(
        model.metadata,
        classes=kept,
        federated=federated,
        confidence=_restrict(model.metadata.confidence, spec.classes, rows),
        broadcast=metadata.broadcast,
        privacy=metadata.privacy,
        refits=metadata.refits + 1,
    )
    made = model._replace(metadata=changed, tensors=tensors)
    notes = [
        _difference(source, made),
        *_limits(metadata, without),
        *personal_model.format_outcome(changed),
    ]
    return Refitted(made, notes)


def _restrict(
    confidence: Confidence | None, classes: Sequence[str], rows: Sequence[int]
) -> Confidence | None:
    """Return the calibration of a model that names only the classes in `rows`, in their order.

    No image that judged it is of another class, and none got more than a trace of probability.
    """
    if confidence is None or confidence.held_out is None:
        return confidence
    labels, probabilities, accepted = confidence.held_out.arrays(len(classes))
    named = probabilities[:, rows]
    named /= named.sum(1, keepdims=True)
    return msgspec.structs.replace(
        confidence,
        thresholds={classes[row]: confidence.thresholds[classes[row]] for row in rows},
        held_out=HeldOut.of(np.searchsorted(rows, labels), named, accepted),
    )


def _spec_of(metadata: ModelMetadata, shared: Tensors) -> Spec:
    """The spec of the model's federation, as far as a head of statistics needs it."""
    classes = metadata.federated or metadata.classes
    privacy = metadata.privacy.settings if metadata.privacy else None
    statistics = make(
        metadata.method, metadata.training, metadata.options, metadata.head, privacy
    ).statistics
    assert statistics is not None
    return Spec(
        federation=metadata.federation,
        run=metadata.run,
        software=metadata.software["edge-node"],
        method=metadata.method,
        options=metadata.options,
        model=metadata.model,
        classes=classes,
        preprocessing=metadata.preprocessing,
        training=metadata.training,
        rounds=metadata.rounds,
        nodes=100_000,  # at most: how many there were is not written down
        quorum=1,
        seed=metadata.seed,
        threads=metadata.threads,
        tensors={},
        sends=(),
        head=metadata.head,
        privacy=privacy,
        statistics=dict(
            statistics.shapes(to_arrays(shared), Shape(FEATURES[metadata.model], len(classes)))
        ),
    )


def _read_images(
    spec: Spec,
    source: Path,
    folder: Path,
    test: Path | None,
    group: str | None,
    aliases: Mapping[str, str],
    without: Sequence[str],
) -> Images:
    scans = [scan_folder(each) for each in (folder, test) if each]
    check_own_aliases(
        aliases, set(chain.from_iterable(found.names for found in scans)), spec.classes
    )
    before = {Path(each.path).parent.name: each.label for each in _listed(source)}
    known = {name: label for name, label in before.items() if name not in spec.classes}
    catalogues = []
    for catalogue in (make_catalogue(found.with_aliases({**known, **aliases})) for found in scans):
        catalogues.append(
            catalogue._replace(
                entries=tuple(
                    entry for entry in catalogue.entries if entry.class_name not in without
                )
            )
        )
    train, *tests = catalogues
    if not train.entries:
        raise UsageError(
            f"no image in {folder} is of a class that stays",
            "add images, or take out fewer classes",
        )
    keys = (
        read_keys(group, list(chain.from_iterable(found.entries for found in scans)))
        if group
        else {}
    )
    size = spec.preprocessing.size
    seed = spec.seed
    held_out = tests[0] if tests else None
    trained = {each.digest for each in personal_model.load_training_images(source)}
    tested = {each.digest for each in personal_model.load_predictions(source)} - trained
    again = held_out is None and any(entry.digest in tested for entry in train.entries)
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    # As when joining: where nothing is trained, each image is left out in its turn.
    anew: HoldOut = "every class" if method.train and not again else "nothing"
    images = load_checked(train, held_out, spec.classes, size, seed, keys, hold_out=anew, least=1)[
        0
    ]
    return _hold_out_again(images.train, tested) if again else images


def _hold_out_again(images: LabelledImages, known: Set[str]) -> Images:
    """Hold out the images with these digests, which the model before had held out,
    and what looks like one of them.

    New images train: those that a line has doubted are harder than others. One of them among a
    dozen held-out images would make the new model's line doubt nearly everything.
    """
    groups = np.arange(len(images.labels)) if images.groups is None else images.groups
    held = np.isin(groups, groups[np.isin(images.digests, [*known])])
    if not held.any() or held.all():
        return Images(images, None)
    return Images(images.take(np.flatnonzero(~held)), images.take(np.flatnonzero(held)))


def _listed(source: Path) -> list[TrainingImage | HeldOutPrediction]:
    """The images of the model in `source`."""
    return [*personal_model.load_training_images(source), *personal_model.load_predictions(source)]


def _difference(source: Path, made: PersonalModel) -> str:
    before = {each.digest: each.label for each in _listed(source)}
    listed: list[TrainingImage | HeldOutPrediction] = [*made.training_images, *made.predictions]
    now = {each.digest: each.label for each in listed}
    moved = sum(before.get(digest, label) != label for digest, label in now.items())
    new = len(now.keys() - before.keys())
    gone = len(before.keys() - now.keys())
    return (
        f"since the model was made, {new} image(s) are new, {gone} are gone, and {moved} have "
        "another class"
    )


def _limits(before: ModelMetadata, without: Sequence[str]) -> list[str]:
    """What a new head does not undo."""
    notes = []
    if make(before.method, before.training, before.options, before.head).train:
        notes.append(
            "the encoder was trained and stays as it is: what is taken out of the head, it has "
            "not unlearned"
        )
    if before.comparison and before.comparison.deployed != "together":
        notes.append(
            f"the model before was {before.comparison.deployed}: what this plant had trained "
            "alone is left out, since it has unlearned nothing; this model is the "
            "federation's part"
        )
    if without:
        notes.append(
            f"this model never names {', '.join(without)}; the others' images of it still count "
            "in how widely images of a class are spread, until the federation collects its "
            "statistics anew"
        )
    return notes
