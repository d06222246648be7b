"""Outcomes as files in a folder, for programs that pick them up there."""

import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from broker_config.disk import sync, writing
from broker_config.errors import EdgeNodeError
from edge.sinks.sink import Item, SinkDown, wire
from edge.verdict import Outcome, Verdict


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="folder"):
    """`[[sinks]] kind = "folder"`: a JSON file each, in a folder for its label."""

    path: str
    most: Annotated[int, Meta(ge=1)] = 100_000  # files; then the oldest is removed


class Folder:
    """A file each, LABEL/SEQ-ID.json, whole when it appears. What is no verdict lies in `_failure` and `_notice`."""

    def __init__(self, path: Path, most: int) -> None:
        """Make the folder if need be; EdgeNodeError when that is not possible."""
        self.name = f"folder:{path.absolute()}"
        self._path = path
        self._most = most
        self._files: deque[Path] = deque()
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)

    def deliver(self, items: Sequence[Item]) -> None:
        """Write the files, and remove the oldest when there are too many."""
        try:
            with writing(self._path):
                if not self._files:
                    self._files.extend(sorted(self._path.glob("*/*.json"), key=_number))
                for item in items:
                    self._write(item)
                for label in {_label(item.outcome) for item in items}:
                    sync(self._path / label)
        except EdgeNodeError as error:
            raise SinkDown(error.what) from error

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, item: Item) -> None:
        folder = self._path / _label(item.outcome)
        folder.mkdir(exist_ok=True)
        file = folder / f"{item.seq}-{item.outcome.id[:8]}.json"
        known = file.exists()  # after a kill it may come again
        scratch = file.with_suffix(".tmp")
        scratch.write_bytes(wire(item))
        sync(scratch)
        scratch.replace(file)
        if not known:
            self._files.append(file)
        while len(self._files) > self._most:
            self._files.popleft().unlink(missing_ok=True)


def _label(outcome: Outcome) -> str:
    if isinstance(outcome, Verdict):
        return re.sub(r"[^\w.-]|^[._]", "-", outcome.label)
    return f"_{type(outcome).__name__.lower()}"


def _number(file: Path) -> int:
    digits = file.name.partition("-")[0]
    return int(digits) if digits.isdigit() else 0
