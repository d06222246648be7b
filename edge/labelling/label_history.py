"""History of the labels that people gave a line's images:
JSON lines in a file to which is only appended.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from broker_config.storage import disk
from edge.sinks.append_file import write_all


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
        """Open or make the file; half a line, which a kill left, is cut off.

        EdgeNodeError when it cannot be written, UsageError when a line of it is damaged.
        """
        self._standing: dict[str, Labelling] = {}
        self.labelled: set[str] = set()  # names of kept images
        self.newest: Labelling | Undo | None = None
        decode = msgspec.json.Decoder(Labelling | Undo).decode
        with disk.writing(path.parent):
            self._file = path.open("a+b", buffering=0)
            disk.sync(path.parent)
            self._file.seek(0)
            whole, newline, _ = self._file.read().rpartition(b"\n")
            self._file.truncate(len(whole) + len(newline))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._apply(decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._file.close()
                raise UsageError(
                    f"the history of labels {path} is damaged in line {number}: {error}",
                    "remove that line",
                ) from error

    def __iter__(self) -> Iterator[Labelling]:
        """The labellings that stand, the newest first."""
        return reversed(self._standing.values())

    def add(self, entry: Labelling | Undo) -> None:
        """Append an entry. OSError, and nothing has changed, when the disk does not take it."""
        write_all(self._file, msgspec.json.encode(entry) + b"\n", sync=True)
        self._apply(entry)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _apply(self, entry: Labelling | Undo) -> None:
        self.newest = entry
        if isinstance(entry, Labelling):
            self._standing[entry.id] = entry
            self.labelled.update(image.kept for image in entry.images)
        else:
            self._standing.pop(entry.labelling.id, None)
            self.labelled.difference_update(image.kept for image in entry.labelling.images)
