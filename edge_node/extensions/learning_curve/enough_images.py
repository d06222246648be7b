"""Learning curves of a plant's folder before it joins,
and of the images behind a personal model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Preprocessing
from broker_config.storage import checksums
from edge.inference.image_decoding import read_image
from edge_node.extensions.learning_curve.learning_curve import DRAWS, LearningCurve, Split, trace
from trainer.data.checks.check_run import load_checked
from trainer.data.checks.image_facts import measure_image
from trainer.data.class_folders import LabelledImages, make_catalogue, split_folds
from trainer.data.folder_scan import Entry, scan_folder
from trainer.data.image_groups import group_images, read_keys
from trainer.data.training_set import TrainingSet
from trainer.methods import make
from trainer.models.catalogue import FEATURES
from trainer.models.initial_weights import choose_weights, initial_encoder
from trainer.models.network import Network, Tensors, to_arrays, to_tensors
from trainer.statistics.features import projected_features
from trainer.statistics.label_doubts import find_doubts, find_judged
from trainer.statistics.lda_head import leave_one_out
from trainer.statistics.sums import MAX_IMAGES, Sums, choose_images, collect
from trainer.training import personal_model
from trainer.training.personal_model import HeldOutPrediction, TrainingImage

_MODEL = "efficientnet_lite0"  # whose weights, of photographs, come with edge-node-weights
# of its features' 1280: a head takes a fiftieth of the time, and is about as good
_DIMENSIONS = 256
_FOLDS = 5
# training and held-out images each; the latter behind a personal model
_MOST = MAX_IMAGES // 2
_MOST_OF_MODEL = 400

Track = Callable[[range], Iterable[int]]


def trace_folder(
    folder: Path,
    test: Path | None,
    size: int,
    group: str | None,
    aliases: Mapping[str, str],
    track: Track,
) -> LearningCurve:
    """The learning curve of a plant's images by themselves, without a federation,
    on features from photographs.

    Args:
        folder: class folders.
        test: class folders of held-out images; without them each image is held out in its turn,
            look-alikes together.
        size: of the network's input, pixels.
        group: what else belongs together, as `read_keys` takes it.
        aliases: the plant's own names of classes.
        track: passes the images' numbers on, to show progress.

    Raises:
        UsageError: what is wrong with the images, or they are too few.
    """
    scans = [scan_folder(each).with_aliases(aliases) for each in (folder, test) if each]
    keys = (
        read_keys(group, list(chain.from_iterable(found.entries for found in scans)))
        if group
        else {}
    )
    catalogues = [make_catalogue(found) for found in scans]
    classes = sorted(set(chain.from_iterable(each.classes for each in catalogues)))
    train, *tests = catalogues
    test_or_none = tests[0] if tests else None
    given = load_checked(train, test_or_none, classes, size, 0, keys, hold_out="nothing")[0]
    images = _limit(given.train, _MOST)
    held_out = _limit(given.test, _MOST) if given.test else None
    tensors = to_tensors(initial_encoder(_MODEL, choose_weights(_MODEL), seed=0), "cpu")
    try:
        return _trace(
            _MODEL,
            tensors,
            Preprocessing(size=size),
            images,
            held_out,
            classes,
            _DIMENSIONS,
            None,
            track,
        )
    except ValueError as error:
        raise UsageError(
            f"there is no learning curve of {folder}: {error}",
            "label several images of each of two classes",
        ) from error


def trace_model(folder: Path, track: Track = iter) -> LearningCurve | None:
    """Return the learning curve behind a personal model with a head of statistics.

    It is of the model's encoder, with the other plants' sums, and of the images that still exist
    unchanged, 400 for training and 400 held out at most. Where nothing was held out because nothing
    was trained, each image is left out in its turn. None without such a head, with too few images,
    where a trained encoder has seen them all, or where the others' sums hold noise.

    Raises:
        UsageError: the model is damaged.
    """
    model = personal_model.load(folder)
    metadata = model.metadata
    if metadata.privacy or not personal_model.has_shared(folder):
        return None
    method = make(metadata.method, metadata.training, metadata.options, metadata.head)
    cross_validated = metadata.metrics.get("cross_validated", True)
    if cross_validated and method.train:
        return None
    shared = personal_model.load_shared(model, folder)
    others = Sums.of(to_arrays(shared))
    classes = metadata.federated or metadata.classes
    size = metadata.preprocessing.size
    dimensions = others.dimensions
    train = _load_unchanged(personal_model.load_training_images(folder), classes, size)
    test = None
    if not cross_validated:
        test = _load_unchanged(personal_model.load_predictions(folder), classes, size)
    if train is None or (test is None and not cross_validated):
        return None
    train = _limit(train, _MOST_OF_MODEL)
    test = _limit(test, _MOST_OF_MODEL) if test else None
    projected = dimensions if dimensions < FEATURES[metadata.model] else 0
    try:
        return _trace(
            metadata.model,
            shared,
            metadata.preprocessing,
            train,
            test,
            classes,
            projected,
            others,
            track,
        )
    except ValueError:
        return None


def _limit(images: LabelledImages, most: int) -> LabelledImages:
    return images.take(choose_images(images.labels, most))


def _load_unchanged(
    listed: Sequence[TrainingImage | HeldOutPrediction], classes: Sequence[str], size: int
) -> LabelledImages | None:
    """The images that are still there as they were, in groups of look-alikes; None without any."""

    kept = []
    pixels = []
    facts = []
    for image in listed:
        content = checksums.read_unchanged(Path(image.path), image.digest)
        if content is None:
            continue
        photo = read_image(content, image.path)
        kept.append(image)
        pixels.append(photo.resize(size))
        facts.append(measure_image(Entry(Path(image.path), image.label, image.digest), photo))
    if not kept:
        return None
    return LabelledImages(
        np.stack(pixels),
        np.array([classes.index(image.label) for image in kept], np.int64),
        tuple(image.digest for image in kept),
        tuple(Path(image.path) for image in kept),
        groups=group_images(facts, {}).numbers,
    )


def _trace(
    model: str,
    tensors: Tensors,
    preprocessing: Preprocessing,
    train: LabelledImages,
    test: LabelledImages | None,
    classes: Sequence[str],
    dimensions: int,
    others: Sums | None,
    track: Track,
) -> LearningCurve:
    """The curve on held-out images or, without any, by cross-validation;
    doubts are of all images.
    """
    network = Network(model, 2)
    joined = TrainingSet.joined(
        [TrainingSet.of(each, preprocessing) for each in (train, test) if each is not None]
    )
    views = np.concatenate(
        [
            projected_features(
                network,
                tensors,
                joined._replace(
                    images=joined.images[number : number + 1],
                    labels=joined.labels[number : number + 1],
                ),
                dimensions,
            )
            for number in track(range(len(joined.labels)))
        ]
    )
    labels = joined.labels.numpy()
    own = np.arange(len(train.labels))
    splits = []
    for draw in range(DRAWS):
        split = (
            [Split(np.setdiff1d(own, fold), fold) for fold in split_folds(train, _FOLDS, draw)]
            if test is None
            else [Split(own, np.arange(len(own), len(labels)))]
        )
        splits.append(split)
    mine = collect(views, labels, len(classes))
    total = others.combine(mine, np.add) if others else mine
    sets = []
    sets_or_empty = test.sets if test else []
    for each in sets_or_empty:
        sets.append([len(own) + number for number in each])
    groups = train.sets + sets
    paths_or_empty = test.paths if test else ()
    paths = [*train.paths, *paths_or_empty]
    logits, cosines = leave_one_out(total, mine, views, labels, groups)
    judged = find_judged(total, labels, groups)
    doubts = find_doubts(
        logits[judged],
        cosines[judged],
        labels[judged],
        [paths[number] for number in judged],
        classes,
    )
    return trace(views, labels, classes, splits, others, doubts)
