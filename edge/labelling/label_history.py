"""History of the labels that people gave a line's images:
a log to which is only appended, and in which each change is noticed.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.storage.checked_log import CheckedLog


class LabelledImage(Struct, frozen=True, kw_only=True):
    """An image that was labelled, and what the model had said of it."""

    kept: str  # its file among the kept images
    file: str  # its file in the class folder
    image: str  # as its source called it
    verdict: str  # the model's class
    confidence: float
    bundle: str
    model: str
    doubts: tuple[str, ...]
    sampled: bool = False  # kept at random


class Labelling(Struct, frozen=True, kw_only=True, tag_field="action", tag="label"):
    """The label that a person gave some images at once."""

    id: str
    time: str  # ISO 8601, UTC
    person: str
    label: str | None  # a class; None: these images shall teach nothing
    images: tuple[LabelledImage, ...]


class Undo(Struct, frozen=True, kw_only=True, tag_field="action", tag="undo"):
    """A labelling that a person took back."""

    time: str
    person: str
    labelling: Labelling


class LabelHistory:
    """The labellings of one line. An entry is on the disk before it takes effect."""

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one; half a line, which a kill left, is left out.

        DamagedError when it is not what was written, OSError when it cannot be read.
        """
        self.path = path
        self.labelled: set[str] = set()  # names of kept images
        self.newest: Labelling | Undo | None = None
        self._standing: dict[str, Labelling] = {}
        self._log: CheckedLog[Labelling | Undo] = CheckedLog(
            path, msgspec.json.Decoder(Labelling | Undo)
        )
        for entry in self._log.read():
            self._apply(entry)

    def __iter__(self) -> Iterator[Labelling]:
        """The labellings that stand, the newest first."""
        return reversed(self._standing.values())

    def add(self, entry: Labelling | Undo) -> None:
        """Append an entry. OSError or DamagedError, and nothing has changed,
        when that cannot be done.
        """
        for other in self._log.append(entry):
            self._apply(other)
        self._apply(entry)

    def _apply(self, entry: Labelling | Undo) -> None:
        self.newest = entry
        if isinstance(entry, Labelling):
            self._standing[entry.id] = entry
            self.labelled.update(image.kept for image in entry.images)
        else:
            self._standing.pop(entry.labelling.id, None)
            self.labelled.difference_update(image.kept for image in entry.labelling.images)
