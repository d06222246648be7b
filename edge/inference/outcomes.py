"""Outcomes that a line reports, a JSON object each: about an image (Verdict,
Failure) and about itself (Notice).
"""

import json
import math
import os
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct


class Box(NamedTuple):
    """A rectangle in a frame, in its pixels."""

    left: int
    top: int
    width: int
    height: int


class Tile(Struct, frozen=True, kw_only=True):
    """The classification of one tile of a frame."""

    box: Box
    label: str
    confidence: float
    defect: bool


class Verdict(Struct, frozen=True, kw_only=True, tag_field="type"):
    """The classification of an image: one verdict a part."""

    image: str
    label: str  # a class; that of the tile that decided
    confidence: float  # of the label, in that tile
    probabilities: dict[str, float]  # of each class, in that tile, under the line's prior
    bundle: str  # NODE@ROUND, and +REFITS if it was made anew since
    milliseconds: float  # decoding and predicting, without waiting
    time: str  # ISO 8601, UTC
    source: str = ""  # where the image came from
    # the manifest's hash, the first 12 digits: tells two bundles of one round apart
    model: str = ""
    defect: bool = True  # False when the label is the class that means no defect
    taught: bool = True  # False when the label is a class that this plant never taught
    # why somebody should look at the image; empty when the verdict is accepted
    doubts: tuple[str, ...] = ()
    disagreement: float | None = None  # of the model's encoders, 0..1
    novelty: float | None = None  # distance from the nearest held-out image or class mean, 0..2
    tiles: tuple[Tile, ...] = ()  # if the frame was cut into several
    kept: str | None = None  # the file in which the image was kept
    id: str = ""  # unique


class Failure(Struct, frozen=True, kw_only=True, tag_field="type"):
    """An image that could not be classified."""

    image: str
    error: str
    remedy: str
    time: str  # ISO 8601, UTC
    source: str = ""
    id: str = ""


class Notice(Struct, frozen=True, kw_only=True, tag_field="type"):
    """An event of the line itself that its operators should know of."""

    kind: Literal["model", "drift", "spool", "source"]
    text: str
    time: str  # ISO 8601, UTC
    details: dict[str, float | str] = {}
    id: str = ""


Outcome = Verdict | Failure | Notice
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Outcome).decode


def encode_outcome(outcome: Outcome) -> bytes:
    """An outcome as JSON that decodes again.

    A verdict with numbers that JSON cannot hold becomes a failure.
    """
    data = _json(outcome)
    try:
        _decode(data)
    except msgspec.DecodeError:
        return _json(_finite(outcome))
    return data


def _json(outcome: Outcome) -> bytes:
    try:
        return _encode(outcome)
    except UnicodeEncodeError:  # the name of a file that is no UTF-8
        return json.dumps(msgspec.to_builtins(outcome), ensure_ascii=False).encode(errors="replace")


def _finite(outcome: Outcome) -> Outcome:
    """The outcome without NaN and infinity."""
    match outcome:
        case Verdict(image=image, time=time, source=source, id=id_):
            error = "the verdict holds a number that is not finite"
            remedy = "check the model: see its verdicts in `infer`"
            return Failure(
                image=image, error=error, remedy=remedy, time=time, source=source, id=id_
            )
        case Notice(details=details):
            return msgspec.structs.replace(
                outcome, details={name: _text(each) for name, each in details.items()}
            )
    return outcome


def _text(value: float | str) -> float | str:
    return value if isinstance(value, str) or math.isfinite(value) else str(value)


def current_time() -> str:
    """The current time in the format of outcomes."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_id() -> str:
    """An id for a new outcome: 128 random bits."""
    return os.urandom(16).hex()
