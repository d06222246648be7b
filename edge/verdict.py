"""What the line says: about an image (Verdict, Failure) and about itself (Notice). One JSON object each."""

import os
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from msgspec import Struct


class Box(NamedTuple):
    """A rectangle in a frame, in its pixels."""

    left: int
    top: int
    width: int
    height: int


class Tile(Struct, frozen=True, kw_only=True):
    """What the model says about one tile of a frame."""

    box: Box
    label: str
    confidence: float
    defect: bool


class Verdict(Struct, frozen=True, kw_only=True, tag_field="type"):
    """An image was judged: one verdict a part."""

    image: str
    label: str  # a class; that of the tile that decided
    confidence: float  # of the label, in that tile
    probabilities: dict[str, float]  # of each class, in that tile
    bundle: str  # NODE@ROUND
    milliseconds: float  # decoding and predicting, without waiting
    time: str  # ISO 8601, UTC
    source: str = ""  # where the image came from
    model: str = ""  # the manifest's hash, the first 12 digits: tells two bundles of one round apart
    defect: bool = True  # False when the label is the class that means no defect
    doubts: tuple[str, ...] = ()  # why somebody should look at the image; empty when the verdict is accepted
    disagreement: float | None = None  # of the model's encoders, 0..1
    novelty: float | None = None  # distance from the nearest image that judged the model, 0..2
    tiles: tuple[Tile, ...] = ()  # when the frame was cut into several
    kept: str | None = None  # the file in which the image was kept
    id: str = ""  # of this judgement, unique


class Failure(Struct, frozen=True, kw_only=True, tag_field="type"):
    """An image could not be judged."""

    image: str
    error: str
    remedy: str
    time: str  # ISO 8601, UTC
    source: str = ""
    id: str = ""


class Notice(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Something about the line itself that its people should know."""

    kind: Literal["model", "drift", "spool", "source"]
    text: str
    time: str  # ISO 8601, UTC
    details: dict[str, float | str] = {}
    id: str = ""


Outcome = Verdict | Failure | Notice


def now() -> str:
    """The time as outcomes bear it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def fresh_id() -> str:
    """A new outcome's id: 128 random bits."""
    return os.urandom(16).hex()
