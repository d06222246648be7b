"""The end of a node's run: which candidate is deployed, and what it is worth on unseen images.

Where the encoder is frozen, heads are cheap: each group of images is predicted by heads made
without it, so all of the plant's images judge (`frozen_heads`). A trained encoder has learnt from
its training images: it is judged on images that were held out from the start or, without any, by
folds whose heads are trained anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch

from edge.bundle.comparison import CandidateName, Comparison, TrainingGain
from edge.bundle.reference import ClassAxes
from edge.inference import native_memory
from edge.inference.class_prior import Prior
from edge.uncertainty.performance import unseen_performance, wilson_interval
from trainer.data.class_folders import Images, LabelledImages, split_folds
from trainer.data.training_set import TrainingSet, encode_all
from trainer.methods import PRIVATE_CLASSIFIERS, complete_options
from trainer.models.fusion import LENGTH, NOVELTY, mix, mix_logits, spread_ratio
from trainer.models.named_tensors import Arrays, select, strip_prefix
from trainer.models.network import Tensors, to_arrays, to_tensors
from trainer.progress.long_work import steps
from trainer.statistics.lda_head import fit_scale
from trainer.statistics.logistic_head import Linear
from trainer.statistics.sums import PREFIX
from trainer.training import frozen_heads
from trainer.training.alone import TrainedAlone, alone_spec
from trainer.training.calibration import MIN_GROUPS, calibrate, softmax
from trainer.training.engine import predict
from trainer.training.evaluation import (
    accuracy,
    choose_trained,
    compare,
    macro_f1,
    predict_among,
    predict_in_service,
)
from trainer.training.first_sums import first_node, measure_gain
from trainer.training.frozen_heads import Together
from trainer.training.own_head import fit_own_head
from trainer.training.participant import State
from trainer.training.personal_model import (
    HeldOutPrediction,
    ModelMetadata,
    PersonalModel,
    TrainingImage,
)

if TYPE_CHECKING:
    from broker_config.protocol.messages import Spec
    from edge.bundle.bundle_format import Confidence
    from trainer.methods.base import Metrics
    from trainer.training.participant import Participant

# of cross-validation
_FOLDS = 5
_FOLD_ROUNDS = 10
# Features of a head that tells novelty in every fold, at most: the time grows with their cube.
_WIDEST = 512


class Judged(NamedTuple):
    """The candidates of a node on images that they have not seen."""

    personal: Tensors  # what is deployed
    deployed: CandidateName
    images: LabelledImages  # that judge
    logits: dict[CandidateName, np.ndarray]  # [n, C] of each candidate
    known: np.ndarray  # bool [n]: whether the image's class can be known without it
    left_out: bool  # whether each image was left out of the model that predicts it
    novelty: np.ndarray | None = None  # [n]
    # [n]: the part of its class's images that was left, if known
    remaining: np.ndarray | None = None


def conclude(
    node: Participant,
    state: State,
    round_: int,
    broadcast: Arrays,
    final: Arrays,
    history: tuple[Metrics, ...],
    alone: TrainedAlone | None,
    everyone: LabelledImages | None = None,
    *,
    counted: bool = True,
    first: Arrays | None = None,
) -> PersonalModel:
    """Return the personal model after the last round, with what it is worth.

    Its `accuracy` with a 95 % interval (`accuracy_low`, `accuracy_high`) is that of the line's
    default: every class is a candidate, those that the plant never taught at less weight. It is
    measured on `images` of the plant's own classes in `groups` of look-alikes, none of which the
    model has seen, and it is the accuracy that the bundle and the line show. `accuracy_own` and the
    macro `f1` have the own classes alone as candidates, `accuracy_all` every class alike;
    `accuracy_others` is the same on images of classes that the plant has none of. A node without
    images that can judge has no metrics.

    Args:
        node: the participant.
        state: after the last round.
        round_: its number.
        broadcast: that it started from.
        final: the average made after it; the same as `broadcast` will do unless `needs_final`.
        history: metrics of each round.
        alone: what the node has trained without others, if the method is not that itself.
        everyone: held-out images of all nodes, if they are at hand; `accuracy_all` is then theirs.
        counted: whether the totals in `final` hold the node's sums, if there are any.
        first: result of `take_first`, if the federation began with sums.

    Raises:
        EdgeNodeError: no nodes can have such totals.
    """
    if first is None:
        ended = _end(node, state, broadcast, final, alone, counted=counted)
        return _describe(node, ended, round_, history, everyone)
    begun_by = first_node(node)
    begun = _end(begun_by, State({}, {}), first, first, None, counted=False)
    gain = TrainingGain(images=0)
    if node.images.test is not None and begun.judged is not None:
        ended = _end(node, state, broadcast, final, alone, counted=counted)
        assert ended.judged is not None
        before = begun.judged
        gain = measure_gain(
            node.own,
            node.images.test,
            (before.images, before.logits[before.deployed]),
            ended.judged.logits[ended.judged.deployed],
        )
        if gain.is_shown:
            return _describe(node, ended, round_, history, everyone, gain)
    return _describe(begun_by, begun, round_, history, everyone, gain)


def conclude_first(node: Participant, first: Arrays) -> PersonalModel:
    """Return the model of the first sums, before anybody has trained.

    Args:
        node: the participant.
        first: what `take_first` has taken.

    Raises:
        EdgeNodeError: no nodes can have such totals.
    """
    return conclude(first_node(node), State({}, {}), 1, first, first, (), None, counted=False)


def conclude_unjudged(
    node: Participant,
    state: State,
    round_: int,
    broadcast: Arrays,
    final: Arrays,
    history: tuple[Metrics, ...],
    *,
    counted: bool = True,
) -> PersonalModel:
    """Return the federation's model for the node, of whose accuracy nothing is known yet.

    Judging takes long; who stops it has a model all the same. The arguments are those of
    `conclude`.

    Raises:
        EdgeNodeError: no nodes can have such totals.
    """
    ended = _end(node, state, broadcast, final, None, counted=counted, judges=False)
    return _describe(node, ended, round_, history, None)


class _Ended(NamedTuple):
    """What a node has at the end of a run."""

    personal: Tensors
    judged: Judged | None  # None without images, or where nothing is judged
    shared: Tensors


def _end(
    node: Participant,
    state: State,
    broadcast: Arrays,
    final: Arrays,
    alone: TrainedAlone | None,
    *,
    counted: bool,
    judges: bool = True,
) -> _Ended:
    """Make the personal model, and judge it, unless that is left out."""
    spec = node.spec
    if spec.statistics:
        others = node.without_own(state, final, counted=counted)
        if not counted:
            state = node.with_statistics(state, final)
        final = others
    shared = to_tensors(select(final, ("encoder", PREFIX))) if spec.statistics else {}
    if not judges or not len(node.images.train.labels):
        return _Ended(node.deploy_last(state, broadcast, final), None, shared)
    if node.is_frozen:
        judged = _judge_frozen(node, state, final)
    else:
        judged = _judge_trained(node, state, broadcast, final, alone)
    native_memory.trim_heap()  # what a head's matrices took
    return _Ended(judged.personal, judged, shared)


def _describe(
    node: Participant,
    ended: _Ended,
    round_: int,
    history: tuple[Metrics, ...],
    everyone: LabelledImages | None,
    gain: TrainingGain | None = None,
) -> PersonalModel:
    """Return the personal model with its figures."""
    spec = node.spec
    training = _training_images(node.images.train, spec.classes)
    trained = dict(sorted(Counter(image.label for image in training).items()))
    metrics: Metrics = {}
    comparison = None
    confidence = None
    predictions: tuple[HeldOutPrediction, ...] = ()
    if ended.judged is not None:
        metrics, confidence, predictions = _measure(node, ended.judged, tuple(trained))
        comparison = _compare(node, ended.judged, history, metrics)
        if comparison is not None:
            comparison = msgspec.structs.replace(comparison, training=gain)
        if metrics and everyone is not None:
            metrics |= _judge_on_all(node, ended.personal, everyone)
    metadata = ModelMetadata.from_spec(
        spec, node.node, round_, trained, metrics, history, comparison, node.epsilon, confidence
    )
    return PersonalModel(metadata, ended.personal, predictions, training, ended.shared)


# Frozen encoders


def _judge_frozen(node: Participant, state: State, final: Arrays) -> Judged:
    """Choose among the heads of a frozen encoder by leaving out groups of images."""
    statistics = node.statistics
    assert statistics is not None
    spec = node.spec
    received = node.received(final)
    data = node.training_set(received)
    features = statistics.features(received, data)
    images = node.images.train.take(statistics.counted)
    views = statistics.views(features, received, data)
    served = views.shape[2] <= _WIDEST
    totals = final

    def fit_together(kept: np.ndarray) -> Together:
        own = statistics.sum(features, kept)
        made = statistics.deploy(own, totals, served=served)
        parts = {name: value.cpu().numpy() for name, value in strip_prefix(NOVELTY, made).items()}
        distance = ClassAxes(**parts).distance if parts else None
        return Together(_linear(made), distance)

    own = to_tensors(statistics.exact(state.tensors), node.device)
    together = statistics.deploy(own, final, served=True)
    logits: dict[CandidateName, np.ndarray]
    test = node.images.test
    if len(images.sets) < MIN_GROUPS:
        if test is not None:
            logits = {"together": node.predict_held_out(together, test)}
            known = _knows(together, test.labels)
            return Judged(together, "together", test, logits, known, left_out=False)
        nothing = np.zeros((len(images.labels), len(spec.classes)))
        unknown = np.zeros(len(images.labels), bool)
        return Judged(together, "together", images, {"together": nothing}, unknown, left_out=True)
    many = len(images.labels) > frozen_heads.MANY
    count = frozen_heads.FOLDS_OF_MANY if many else frozen_heads.FOLDS
    folds = split_folds(images, min(count, len(images.sets)), spec.seed)
    elsewhere = statistics.count_images(final)
    left_out = frozen_heads.leave_out(views, images.labels, folds, elsewhere, fit_together)
    judged = frozen_heads.judge(views, images.labels, node.own, left_out, _linear(together))
    scaled = judged.head.weight / float(together[LENGTH])  # of features of length one
    weight = torch.from_numpy(scaled.astype(np.float32)).to(node.device)
    bias = torch.from_numpy(judged.head.bias.astype(np.float32)).to(node.device)
    personal = {**together, "classifier.weight": weight, "classifier.bias": bias}
    if test is None:
        return Judged(
            personal,
            judged.deployed,
            images,
            judged.logits,
            judged.known,
            left_out=True,
            novelty=judged.novelty,
            remaining=judged.remaining,
        )
    unseen = TrainingSet.of(test, spec.preprocessing, node.device)
    seen = encode_all(node.network, received, unseen)
    seen = seen / np.maximum(np.linalg.norm(seen, axis=1, keepdims=True), 1e-12)
    tested = {name: head.logits(seen) for name, head in judged.heads.items()}
    known = np.asarray(judged.head.weight[test.labels].any(1))
    return Judged(personal, judged.deployed, test, tested, known, left_out=False)


def _linear(personal: Tensors) -> Linear:
    """Return the classifier of a model of features of length one."""
    length = float(personal[LENGTH])
    weight = personal["classifier.weight"].cpu().numpy().astype(np.float64)
    return Linear(weight * length, personal["classifier.bias"].cpu().numpy().astype(np.float64))


# Trained encoders


def _judge_trained(
    node: Participant, state: State, broadcast: Arrays, final: Arrays, alone: TrainedAlone | None
) -> Judged:
    """Choose among what was trained alone, together, and both mixed."""
    together = node.deploy_last(state, broadcast, final)
    images, logits, known = _predict_candidates(node, together, final, alone)
    if node.spec.statistics:
        certainty = fit_scale(logits["together"][known], images.labels[known], 1)
        logits["together"] *= certainty
        together |= {
            name: value * certainty for name, value in select(together, ("classifier",)).items()
        }
        together = _lengthen(node, together)
    deployed: CandidateName = "together"
    personal = together
    if alone is not None:
        own = np.isin(images.labels, node.own)
        scale = spread_ratio(logits["together"], logits["alone"], node.own)
        logits["mixed"] = mix_logits(logits["together"], logits["alone"], node.own, scale)
        by_itself = alone.tensors
        if len(node.own) > 1:
            by_itself, logits["alone"] = _best_alone(node, alone, images, logits["alone"])
        among = {name: each[own] for name, each in logits.items()}
        deployed = choose_trained(among, images.labels[own], node.own)
        candidates = {"alone": by_itself, "together": together}
        personal = candidates.get(deployed) or mix(together, alone.tensors, node.own, scale)
    left_out = node.images.test is None
    return Judged(personal, deployed, images, logits, known, left_out)


def _best_alone(
    node: Participant, alone: TrainedAlone, images: LabelledImages, trained: np.ndarray
) -> tuple[Tensors, np.ndarray]:
    """Return the best that the plant can do by itself, and its logits [n, C] for the images.

    `trained` are those of the model that has been trained alone; the other is the plant's head of
    the encoder that the run began with.
    """
    head = fit_own_head(node, alone.initial)
    test = node.images.test
    fitted = head.left_out if test is None else node.predict_held_out(head.tensors, test)
    own = np.isin(images.labels, node.own)
    right = [
        int((predict_in_service(each[own], node.own) == images.labels[own]).sum())
        for each in (trained, fitted)
    ]
    return (head.tensors, fitted) if right[1] > right[0] else (alone.tensors, trained)


def _predict_candidates(
    node: Participant, together: Tensors, final: Arrays, alone: TrainedAlone | None
) -> tuple[LabelledImages, dict[CandidateName, np.ndarray], np.ndarray]:
    """Return the images by which models are compared, each model's logits, and `_knows` [n]."""
    test = node.images.test
    logits: dict[CandidateName, np.ndarray]
    if test is not None:
        logits = {"together": node.predict_held_out(together, test)}
        if alone is not None:
            logits["alone"] = node.predict_held_out(alone.tensors, test)
        return test, logits, _knows(together, test.labels)
    spec = node.spec
    start = final
    if not spec.statistics and ("classifier.weight" in final or node.method.adapt is not None):
        # A shared classifier has learnt more from an image than the averaged encoder: folds train
        # private ones on that encoder.
        options = complete_options(PRIVATE_CLASSIFIERS, {})
        spec = msgspec.structs.replace(spec, method=PRIVATE_CLASSIFIERS, options=options)
        # with private layers, it is whole only as deployed
        average = to_arrays(together) if node.deploys_final else final
        start = select(average, ("encoder",))
    together_logits, known = _cross_validate(node, spec, start)
    logits = {"together": together_logits}
    if alone is not None:
        logits["alone"], _ = _cross_validate(node, alone_spec(node.spec), alone.initial)
    return node.images.train, logits, known


def _cross_validate(node: Participant, spec: Spec, start: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return logits [n, C] for the training images, each by a fold's model, and `_knows` [n]."""
    images = node.images.train
    count = len(images.labels)
    logits = np.empty((count, len(node.spec.classes)), np.float32)
    known = np.empty(count, bool)
    features = None
    if spec.statistics:
        assert node.statistics is not None
        received = node.received(start)
        features = node.statistics.features(received, node.training_set(received))
    folds = split_folds(images, min(_FOLDS, count), spec.seed)
    for held_out in steps("judging: images left out in turn", folds):
        if features is None:
            others = np.setdiff1d(np.arange(count), held_out)
            personal = _train_fold(node, spec, start, images.take(others))
        else:
            assert node.statistics is not None
            kept = np.flatnonzero(~np.isin(node.statistics.counted, held_out))
            own = node.statistics.sum(features, kept)
            personal = node.statistics.deploy(own, start, served=False)
        data = TrainingSet.of(images.take(held_out), node.spec.preprocessing, node.device)
        logits[held_out] = _predict(node, personal, data)
        known[held_out] = _knows(personal, images.labels[held_out])
    return logits, known


def _train_fold(node: Participant, spec: Spec, start: Arrays, images: LabelledImages) -> Tensors:
    """Return the personal model that training on these images from `start` gives."""
    fold = node.fold(spec, Images(images, None))
    state = fold.start(start)
    for round_ in range(min(_FOLD_ROUNDS, spec.rounds)):
        state, _, _ = fold.contribute(state, start, round_)
        state, _ = fold.refine(state, start, round_)
    return fold.deploy_last(state, start, start)


def _lengthen(node: Participant, personal: Tensors) -> Tensors:
    """Return the same model of normalised features, at the mean length that its images have.

    Its logits stay. Mixed with a model whose features are as they come, neither drowns the other in
    a distance.
    """
    if LENGTH not in personal or not len(node.data.labels):
        return personal
    torch.set_num_threads(node.spec.threads)
    length = float(np.linalg.norm(encode_all(node.network, personal, node.data), axis=1).mean())
    if length == 0:
        return personal
    weight = personal["classifier.weight"] / length
    return personal | {LENGTH: personal[LENGTH] * length, "classifier.weight": weight}


# Figures


def _measure(
    node: Participant, judged: Judged, trained: Sequence[str]
) -> tuple[Metrics, Confidence | None, tuple[HeldOutPrediction, ...]]:
    """Return the figures of what is deployed, its calibration, and its verdicts on the images."""
    spec = node.spec
    images = judged.images
    logits = judged.logits[judged.deployed]
    taken = predict_in_service(logits, node.own)
    probabilities = softmax(logits)
    rows = np.flatnonzero(np.isin(images.labels, node.own) & judged.known)
    # An image that is left out says nothing where no other one shows its class.
    shown = np.flatnonzero(judged.known | (not judged.left_out))
    metrics: Metrics = {}
    confidence = None
    if len(rows):
        labels = images.labels[rows]
        groups = images.take(rows).sets
        low, high = wilson_interval(int((taken[rows] == labels).sum()), len(rows))
        share = accuracy(taken[rows], labels)
        if len(groups) >= MIN_GROUPS:
            weights = Prior().weights(spec.classes, trained)
            remaining = None if judged.remaining is None else judged.remaining[rows]
            calibrated = calibrate(logits[rows], labels, spec.classes, weights, groups, remaining)
            confidence = calibrated.confidence
            taken[rows] = calibrated.taken
            probabilities[rows] = calibrated.probabilities
            found = unseen_performance(confidence, spec.classes, trained)
            assert found is not None
            share = found.accuracy.share
            low = found.accuracy.low
            high = found.accuracy.high
        own = predict_among(logits[rows], node.own)
        metrics = {
            "accuracy": share,
            "accuracy_low": low,
            "accuracy_high": high,
            "accuracy_own": accuracy(own, labels),
            "f1": macro_f1(own, labels),
            "images": float(len(rows)),
            "groups": float(len(groups)),
            "accuracy_all": accuracy(logits[shown].argmax(1), images.labels[shown]),
            "cross_validated": float(judged.left_out),
        }
    distances: Sequence[float | None] = [None] * len(taken)
    if judged.novelty is not None:
        distances = judged.novelty.tolist()
    predictions = [
        HeldOutPrediction(
            path=str(images.paths[position].resolve()),
            digest=images.digests[position],
            label=spec.classes[images.labels[position]],
            verdict=spec.classes[taken[position]],
            confidence=float(probabilities[position].max()),
            novelty=distances[position],
        )
        for position in shown.tolist()
    ]
    return metrics, confidence, tuple(predictions)


def _compare(
    node: Participant, judged: Judged, history: Sequence[Metrics], metrics: Metrics
) -> Comparison | None:
    """Return the comparison of the candidates; None if there is but one, or nothing judges."""
    if len(judged.logits) < 2 or not metrics:
        return None
    rows = np.isin(judged.images.labels, node.own) & judged.known
    compared = compare(
        {name: logits[rows] for name, logits in judged.logits.items()},
        judged.images.labels[rows],
        node.own,
        [each["accuracy"] for each in history if "accuracy" in each],
        deployed=judged.deployed,
        cross_validated=judged.left_out,
        independent=metrics["groups"] / metrics["images"],
    )
    # The one figure of the model: its verdicts are calibrated.
    chosen = msgspec.structs.replace(
        compared.chosen,
        accuracy=metrics["accuracy"],
        low=metrics["accuracy_low"],
        high=metrics["accuracy_high"],
    )
    return msgspec.structs.replace(compared, **{judged.deployed: chosen})


def _judge_on_all(node: Participant, deployed: Tensors, everyone: LabelledImages) -> Metrics:
    """Return the accuracy on all nodes' held-out images, and on those of others' classes."""
    data = TrainingSet.of(everyone, node.spec.preprocessing, node.device)
    right = _predict(node, deployed, data).argmax(1) == everyone.labels
    others = ~np.isin(everyone.labels, node.own)
    metrics = {"accuracy_all": float(right.mean())}
    if others.any():
        metrics["accuracy_others"] = float(right[others].mean())
    return metrics


def _predict(node: Participant, personal: Tensors, data: TrainingSet) -> np.ndarray:
    torch.set_num_threads(node.spec.threads)
    return predict(node.network, personal, data)


def _knows(personal: Tensors, labels: np.ndarray) -> np.ndarray:
    """Return whether a model knows anything of each of these classes, [n].

    Without images of a class, its weight is zero.
    """
    return np.asarray(personal["classifier.weight"][torch.from_numpy(labels)].any(1).cpu())


def _training_images(images: LabelledImages, classes: Sequence[str]) -> tuple[TrainingImage, ...]:
    return tuple(
        TrainingImage(path=str(path.resolve()), digest=digest, label=classes[label])
        for path, digest, label in zip(images.paths, images.digests, images.labels, strict=True)
    )
