"""Gate: admission tests of a new model before its rollout,
against the running model on the line's latest images.
"""

import itertools
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from PIL import Image

from broker_config.protocol.errors import EdgeNodeError
from edge.bundle.bundle_format import Manifest
from edge.inference.pipeline import Inspection
from edge.inference.predictor import Predictor
from edge.inference.served_model import Model

SAMPLE = 64  # inputs of the network
ENOUGH = 16  # inputs that are needed to compare two models
# inputs of one class, by the running model, that are needed to compare on that class
OF_A_CLASS = 8
# tiles that a frame adds besides the deciding one, so that the sample spans several frames
_OF_A_FRAME = 4
_MOVES = 3  # changes of verdicts that are listed
_RUNS = 15  # at least, for the median latency of a model
# Runs and seconds after which a model that is over the limit is given up: while it computes, the
# line carries out no other command.
_FEW_RUNS = 3
_LONGEST = 20.0
REST = 4.0  # pause after each run, in multiples of its duration: the line needs the processor


class Gate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[gate]` of a line's settings: limits for a new bundle,
    before it is served and during its probation.
    """

    latency: Annotated[float, Meta(gt=0)] | None = (
        None  # seconds for an image: median before, 95th percentile in service
    )
    # limit of its median latency, as a multiple of the running model's
    slower: Annotated[float, Meta(ge=1)] = 3.0
    agreement: Annotated[float, Meta(ge=0, le=1)] = (
        0.8  # share of the last images, and of each class, on which both must agree
    )
    # limit of the rise in the share of doubted verdicts in service
    doubts: Annotated[float, Meta(gt=0, le=1)] = 0.25
    minutes: Annotated[float, Meta(ge=0)] = 10.0  # of probation at least
    frames: Annotated[int, Meta(ge=0)] = 100  # likewise; after a day, fewer suffice


class SampledInput(NamedTuple):
    """An input of the network with the running model's result."""

    pixels: NDArray[np.uint8]  # [size, size, 3]
    label: str
    seconds: float


class Sample:
    """The running model's latest inputs without doubt; those of rare classes stay longest.

    Written and read in different threads.
    """

    def __init__(self) -> None:
        self._inputs: list[SampledInput] = []  # the oldest first
        self._digest = ""  # of the model

    def add(self, inspection: Inspection) -> None:
        """Keep some of a frame's tiles and the deciding one; inputs of another model are discarded.

        A verdict in doubt is left out: whoever disagrees with it may have learnt better.
        """
        if inspection.model.digest != self._digest:
            self._inputs = []
            self._digest = inspection.model.digest
        if inspection.verdict.doubts:
            return
        pixels = inspection.tiled.pixels
        classes = inspection.model.manifest.classes
        # the graph's own: the gate compares graphs, not priors
        labels = inspection.outputs.probabilities.argmax(1)
        some = np.linspace(0, len(pixels) - 1, min(len(pixels), _OF_A_FRAME)).astype(int).tolist()
        seconds = inspection.inference_seconds / len(pixels)
        for tile in sorted({*some, inspection.tile}):
            self._append(SampledInput(pixels[tile].copy(), classes[labels[tile]], seconds))

    def _append(self, sampled: SampledInput) -> None:
        """Append an input; the oldest of the commonest class makes room."""
        self._inputs.append(sampled)
        if len(self._inputs) > SAMPLE:
            labels = [each.label for each in self._inputs]
            [(commonest, _)] = Counter(labels).most_common(1)
            del self._inputs[labels.index(commonest)]

    def inputs_of(self, model: Model) -> list[SampledInput]:
        """The latest inputs of this model."""
        inputs = self._inputs
        return inputs.copy() if self._digest == model.digest else []


class Finding(NamedTuple):
    """The result of one admission test."""

    good: bool
    text: str


def assess_candidate(
    candidate: Model,
    running: Model | None,
    sample: Sequence[SampledInput],
    gate: Gate,
    stop: threading.Event,
) -> list[Finding]:
    """Admission tests of `candidate`, whose signature and self-test have passed.

    EdgeNodeError when `stop` is set meanwhile.
    """
    # with fewer images nothing is compared, so that a slow model need not compute all of them
    limit = _latency_limit(sample, gate) if len(sample) >= ENOUGH else 0.0
    labels, seconds = _predict(candidate.predictor, sample, limit, stop)
    findings = [*_check_classes(candidate, running), *_check_latency(seconds, sample, gate)]
    if running:
        findings += _describe_teaching(candidate.manifest, running.manifest)
    if running and len(labels) == len(sample):
        findings.append(_check_agreement(labels, [each.label for each in sample], gate))
    return findings


def _predict(
    predictor: Predictor, sample: Sequence[SampledInput], limit: float, stop: threading.Event
) -> tuple[list[str], float]:
    """The label of each image and the median seconds for one,
    with pauses in which the line can work.

    A model that takes long, and more than `limit` seconds an image, does not get all of them.
    """
    size = predictor.manifest.input.size
    blanks = itertools.repeat(np.zeros((size, size, 3), np.uint8), max(0, _RUNS - len(sample)))
    labels = list[str]()
    taken = list[float]()
    for image in itertools.chain(inputs_for(predictor.manifest, sample), blanks):
        start = time.perf_counter()
        labels += predictor.labels(image[None])
        taken.append(time.perf_counter() - start)
        if stop.wait(REST * taken[-1]):
            raise EdgeNodeError("the line ends", "activate the bundle when it runs again")
        is_long = len(taken) >= _FEW_RUNS and sum(taken) > _LONGEST
        if is_long and statistics.median(taken) > limit:
            break
    return labels[: len(sample)], statistics.median(taken)


def inputs_for(manifest: Manifest, sample: Sequence[SampledInput]) -> Iterator[NDArray[np.uint8]]:
    """Yield the inputs in the size that a bundle's graph wants, made one after another: 64 of
    the largest size would be 3 GB.
    """
    for each in sample:
        yield resize(each.pixels, manifest.input.size)


def resize(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Return an image in this size, as it is if it has that."""
    if pixels.shape[0] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR))


def _check_classes(candidate: Model, running: Model | None) -> list[Finding]:
    new = candidate.manifest.classes
    old = running.manifest.classes if running else None
    if old is None or set(new) == set(old):
        return [Finding(True, f"it tells {len(new)} classes apart")]
    return [Finding(False, describe_classes(new, old))]


def describe_classes(new: Sequence[str], old: Sequence[str]) -> str:
    """Say how the classes of a model differ from those of the one before."""
    added = sorted(set(new) - set(old))
    gone = sorted(set(old) - set(new))
    parts = [
        f"{what} {', '.join(names)}" for what, names in (("new", added), ("gone", gone)) if names
    ]
    return f"its classes are not those of the model before: {'; '.join(parts)}"


def _describe_teaching(new: Manifest, old: Manifest) -> list[Finding]:
    """Classes that the plant has images of now, and had none of before."""
    taught = sorted(set(new.trained) - set(old.trained))
    if not taught or not old.trained:
        return []
    return [Finding(True, f"it was taught {', '.join(taught)}, which the running one was not")]


def _latency_limit(sample: Sequence[SampledInput], gate: Gate) -> float:
    """Return the seconds for an image above which `_check_latency` refuses a model."""
    limits = [math.inf]
    if gate.latency is not None:
        limits.append(gate.latency)
    if len(sample) >= ENOUGH:
        limits.append(gate.slower * statistics.median(each.seconds for each in sample))
    return min(limits)


def _check_latency(seconds: float, sample: Sequence[SampledInput], gate: Gate) -> list[Finding]:
    found = f"an image takes it {1000 * seconds:.1f} ms"
    if gate.latency is not None and seconds > gate.latency:
        return [Finding(False, f"{found}; [gate] latency allows {1000 * gate.latency:g} ms")]
    if len(sample) >= ENOUGH:
        before = statistics.median(each.seconds for each in sample)
        if seconds > gate.slower * before:
            return [
                Finding(
                    False,
                    f"{found}, more than {gate.slower:g} times the running one's "
                    f"{1000 * before:.1f} ms",
                )
            ]
    return [Finding(True, found)]


def _check_agreement(new: Sequence[str], old: Sequence[str], gate: Gate) -> Finding:
    """Agreement on all images and on each class: if most parts are good,
    "always good" agrees on nearly all.
    """
    agreed = Counter(a for a, b in zip(new, old, strict=True) if a == b)
    found = f"it agrees with the running one on {agreed.total()} of the last {len(old)} images"
    if len(old) < ENOUGH:
        return Finding(True, f"{found}: too few to judge by")
    counts = {label: count for label, count in Counter(old).items() if count >= OF_A_CLASS}
    worst = min(counts, key=lambda label: agreed[label] / counts[label], default=None)
    moved = Counter((was, now) for now, was in zip(new, old, strict=True) if now != was)
    moves = [f"{count} from {was} to {now}" for (was, now), count in moved.most_common(_MOVES)]
    asked = (
        f"[gate] agreement asks for {gate.agreement:.0%}; verdicts change most: {', '.join(moves)}"
    )
    if worst is not None and agreed[worst] < gate.agreement * counts[worst]:
        return Finding(
            False,
            f"{found}, on {agreed[worst]} of {counts[worst]} that are {worst} to that one; {asked}",
        )
    if agreed.total() < gate.agreement * len(old):
        return Finding(False, f"{found}; {asked}")
    return Finding(True, found)
