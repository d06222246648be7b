"""What a new model must show before it is served: beside the running one, on what the line has just seen."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from PIL import Image

from edge.inference.pipeline import Inspection
from edge.inference.predictor import Predictor
from edge.inference.served_model import Model

SAMPLE = 64  # of the network's inputs
ENOUGH = 16  # of them, to compare two models by
OF_A_CLASS = 8  # of them that the running model calls the same, to compare by that class alone
_OF_A_FRAME = 4  # tiles that a frame adds besides the one that decided, so that the sample spans several
_RUNS = 15  # at least, whose median is a model's latency
_REST = 4.0  # times as long as it has computed the gate leaves the processor to the line


class Gate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[gate]` of a line's settings: what a new bundle must show, before it is served and for a while after."""

    latency: Annotated[float, Meta(gt=0)] | None = (
        None  # seconds for an image: median before, 95th percentile in service
    )
    slower: Annotated[float, Meta(ge=1)] = 3.0  # times the running model's median latency that it may take
    agreement: Annotated[float, Meta(ge=0, le=1)] = (
        0.8  # share of the last images, and of each class, that both must call the same
    )
    doubts: Annotated[float, Meta(gt=0, le=1)] = 0.25  # by which the share of doubted verdicts may rise in service
    minutes: Annotated[float, Meta(ge=0)] = 10.0  # that probation lasts at least
    frames: Annotated[int, Meta(ge=0)] = 100  # likewise; a line that has seen fewer within a day is believed


class Shadow(NamedTuple):
    """One of the network's inputs, and what the running model made of it."""

    pixels: NDArray[np.uint8]  # [size, size, 3]
    label: str
    seconds: float


class Sample:
    """The last of what the running model has judged, so that rare classes stay. Fed and read in different threads."""

    def __init__(self) -> None:
        self._shadows: list[Shadow] = []  # the oldest first
        self._of = ""  # the model's digest

    def see(self, inspection: Inspection) -> None:
        """Keep some of a frame's tiles, and the one that decided; those of another model are forgotten."""
        if inspection.model.digest != self._of:
            self._shadows, self._of = [], inspection.model.digest
        pixels, classes = inspection.tiled.pixels, inspection.model.manifest.classes
        labels = inspection.outputs.probabilities.argmax(1)
        some = np.linspace(0, len(pixels) - 1, min(len(pixels), _OF_A_FRAME)).astype(int).tolist()
        for tile in sorted({*some, inspection.tile}):
            self._add(Shadow(pixels[tile].copy(), classes[labels[tile]], inspection.inference_seconds / len(pixels)))

    def _add(self, shadow: Shadow) -> None:
        """The oldest of the class that has most makes room."""
        self._shadows.append(shadow)
        if len(self._shadows) > SAMPLE:
            labels = [each.label for each in self._shadows]
            [(commonest, _)] = Counter(labels).most_common(1)
            del self._shadows[labels.index(commonest)]

    def of(self, model: Model) -> list[Shadow]:
        """What this model has judged last."""
        shadows = self._shadows
        return shadows.copy() if self._of == model.digest else []


class Finding(NamedTuple):
    """What the gate says about one thing."""

    good: bool
    text: str


def examine(candidate: Model, running: Model | None, sample: Sequence[Shadow], gate: Gate) -> list[Finding]:
    """What speaks for and against serving `candidate`, whose signature and self-test are right."""
    images = [_fitted(each.pixels, candidate.manifest.input.size) for each in sample]
    labels, seconds = _judged(candidate.predictor, images)
    findings = [*_classes(candidate, running), *_latency(seconds, sample, gate)]
    if running:
        findings.append(_agreement(labels, [each.label for each in sample], gate))
    return findings


def _judged(predictor: Predictor, images: Sequence[NDArray[np.uint8]]) -> tuple[list[str], float]:
    """The label of each image, and the median seconds for one. Slowly: the line goes on meanwhile."""
    size = predictor.manifest.input.size
    blank = np.zeros((size, size, 3), np.uint8)
    labels, taken = [], []
    for image in [*images, *[blank] * (_RUNS - len(images))]:
        start = time.perf_counter()
        labels += predictor.labels(image[None])
        taken.append(time.perf_counter() - start)
        time.sleep(_REST * taken[-1])
    return labels[: len(images)], statistics.median(taken)


def _fitted(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    if pixels.shape[0] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR))


def _classes(candidate: Model, running: Model | None) -> list[Finding]:
    new, old = candidate.manifest.classes, running.manifest.classes if running else None
    if old is None or set(new) == set(old):
        return [Finding(True, f"it tells {len(new)} classes apart")]
    others = ", ".join(sorted(set(new) ^ set(old)))
    return [Finding(False, f"it has not the running model's classes: {others}")]


def _latency(seconds: float, sample: Sequence[Shadow], gate: Gate) -> list[Finding]:
    found = f"an image takes it {1000 * seconds:.1f} ms"
    if gate.latency is not None and seconds > gate.latency:
        return [Finding(False, f"{found}; [gate] latency allows {1000 * gate.latency:g} ms")]
    if len(sample) >= ENOUGH:
        before = statistics.median(each.seconds for each in sample)
        if seconds > gate.slower * before:
            return [
                Finding(False, f"{found}, more than {gate.slower:g} times the running one's {1000 * before:.1f} ms")
            ]
    return [Finding(True, found)]


def _agreement(new: Sequence[str], old: Sequence[str], gate: Gate) -> Finding:
    """On all images, and on those of each class: where most parts are good, saying so always agrees on nearly all."""
    agreed = Counter(a for a, b in zip(new, old, strict=True) if a == b)
    found = f"it agrees with the running one on {agreed.total()} of the last {len(old)} images"
    if len(old) < ENOUGH:
        return Finding(True, f"{found}: too few to judge by")
    judged = {label: count for label, count in Counter(old).items() if count >= OF_A_CLASS}
    worst = min(judged, key=lambda label: agreed[label] / judged[label], default=None)
    asked = f"[gate] agreement asks for {gate.agreement:.0%}"
    if worst is not None and agreed[worst] < gate.agreement * judged[worst]:
        return Finding(False, f"{found}, on {agreed[worst]} of {judged[worst]} that are {worst} to that one; {asked}")
    if agreed.total() < gate.agreement * len(old):
        return Finding(False, f"{found}; {asked}")
    return Finding(True, found)
