"""Images of three colours, a tiny bundle that has judged some of them,
and a line that serves it.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.bundle.bundle_format import Confidence
from edge.bundle.reference import Reference
from edge.inference.outcomes import Failure, Notice, Outcome, Verdict
from edge.inference.pipeline import Frame, Monitor, Pipeline
from edge.inference.predictor import Predictor
from edge.inference.served_model import load_model
from tests.support.tiny_bundle import CLASSES, tiny_bundle

SIZE = 16
# without a mean: a frame of one colour would be blank
STRIPES = np.tile([6, 6, -6, -6], SIZE // 4)[:, None, None]
CONFIDENCE = Confidence(
    images=60, coverage=0.95, accuracy=0.99, thresholds={"red": 0.8, "green": 0.8, "blue": 0.8}
)


def picture(
    random: np.random.Generator, label: int, *, strong: float = 80, noise: float = 8
) -> NDArray[np.uint8]:
    """uint8 [SIZE, SIZE, 3]: gray with more of one colour, in stripes."""
    color = np.full(3, 110.0)
    color[label] += strong
    return np.clip(
        color + random.normal(0, noise, 3) + STRIPES + np.zeros((SIZE, SIZE, 1)), 0, 255
    ).astype(np.uint8)


def pictures(count: int, seed: int) -> NDArray[np.uint8]:
    """As many of each colour."""
    random = np.random.default_rng(seed)
    return np.stack([picture(random, number % 3) for number in range(count)])


def judged_bundle(
    folder: Path, *, confidence: Confidence | None = CONFIDENCE, images: int = 60, node: str = "a"
) -> Path:
    """A bundle with a reference from so many images."""
    outputs = Predictor(tiny_bundle(folder, extras=True)).run(
        pictures(images, 0), ("opinions", "features")
    )
    assert outputs.features is not None
    reference = Reference.from_features(
        outputs.features, outputs.probabilities.argmax(1), len(CLASSES), outputs.opinions
    )
    tiny_bundle(folder, extras=True, confidence=confidence, reference=reference.encode(), node=node)
    return folder


class Told:
    """An outbox that remembers."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def put(self, outcome: Outcome) -> None:
        """Take it."""
        self.outcomes.append(outcome)

    @property
    def notices(self) -> list[Notice]:
        """What the line said of itself."""
        return [each for each in self.outcomes if isinstance(each, Notice)]


def a_line(folder: Path, told: Told, *monitors: Monitor) -> Pipeline:
    """A line that serves a bundle."""
    return Pipeline(load_model(folder), told, monitors=monitors)


def judge(pipeline: Pipeline, *frames: Frame) -> list[Verdict | Failure]:
    """What the line makes of frames, one after another."""

    async def judged() -> list[Verdict | Failure]:
        return [await pipeline.classify(frame) for frame in frames]

    return asyncio.run(judged())


def shown(pipeline: Pipeline, images: Sequence[NDArray[np.uint8]]) -> list[Verdict]:
    """The verdicts on frames of a camera."""
    found = judge(
        pipeline,
        *(Frame(f"frame-{number}", image, "camera") for number, image in enumerate(images)),
    )
    assert all(isinstance(each, Verdict) for each in found), found
    return [each for each in found if isinstance(each, Verdict)]
