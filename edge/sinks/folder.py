"""Outcomes as files in a folder, for programs that pick them up there."""

import contextlib
import os
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from broker_config.protocol.errors import EdgeNodeError
from broker_config.storage.disk import read_regular, sync, writing
from edge.config.instance import Instance
from edge.inference.outcomes import Outcome, Verdict
from edge.sinks.sink import IsOurs, Item, Origin, SinkDown, to_json

_LAST = ".last"


class Settings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="folder"
):
    """`[[sinks]] kind = "folder"`: a JSON file for each outcome, in a folder for its label."""

    path: str
    most: Annotated[int, Meta(ge=1)] = 100_000  # files; then the oldest is removed

    def open_sink(self, instance: Instance, origin: Origin) -> "Folder":
        """Open the sink."""
        return Folder(Path(self.path), self.most, origin.contains)


class Folder:
    """A file for each outcome, LABEL/SEQ-ID.json, complete when it appears.

    Failures and notices have own folders.

    Readers may remove files: `.last` names the latest that was about to appear, and a leftover
    temporary file shows that it did not.
    """

    def __init__(self, path: Path, most: int, is_ours: IsOurs) -> None:
        """Create the folder if need be; EdgeNodeError when that is not possible."""
        self.name = f"folder:{path.absolute()}"
        self._path = path
        self._most = most
        self._files: deque[Path] = deque()
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            self._last = self._recover(is_ours)  # the last outcome that got its file

    def deliver(self, items: Sequence[Item]) -> None:
        """Write the files, and remove the oldest when there are too many."""
        try:
            with writing(self._path):
                if not self._files:
                    self._files.extend(sorted(self._path.glob("*/*.json"), key=_number))
                fresh = [item for item in items if item.seq > self._last]
                for item in fresh:
                    self._write(item)
                for folder in {self._path / _label(item.outcome) for item in items}:
                    if folder.exists():
                        sync(folder)
                if fresh:
                    sync(self._path / _LAST)
        except EdgeNodeError as error:
            raise SinkDown(error.what) from error

    def close(self) -> None:
        """Nothing to close."""

    def _write(self, item: Item) -> None:
        folder = self._path / _label(item.outcome)
        folder.mkdir(exist_ok=True)
        file = folder / f"{item.seq}-{item.outcome.id[:8]}.json"
        known = file.exists()  # after a power cut an outcome may come again
        scratch = file.with_suffix(".tmp")
        scratch.write_bytes(to_json(item))
        sync(scratch)
        self._write_last(item)
        scratch.replace(file)
        self._last = item.seq
        if not known:
            self._files.append(file)
        while len(self._files) > self._most:
            self._files.popleft().unlink(missing_ok=True)

    def _write_last(self, item: Item) -> None:
        """Overwrite `.last` in place with as many bytes as before:
        a kill cannot leave half of it.
        """
        descriptor = os.open(self._path / _LAST, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, b"%020d %b\n" % (item.seq, item.outcome.id.encode()))
        finally:
            os.close(descriptor)

    def _recover(self, is_ours: IsOurs) -> int:
        """The last outcome that got its file, if it is one of the line's outbox; else 0."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            number, id_ = read_regular(self._path / _LAST).decode().split()
            missing = [_number(file) - 1 for file in self._path.glob("*/[0-9]*-*.tmp")]
            return min([int(number), *missing]) if is_ours(int(number), id_) else 0
        return 0


def _label(outcome: Outcome) -> str:
    if isinstance(outcome, Verdict):
        return re.sub(r"[^\w.-]|^[._]", "-", outcome.label)
    return f"_{type(outcome).__name__.lower()}"


def _number(file: Path) -> int:
    digits = file.name.partition("-")[0]
    return int(digits) if digits.isdigit() else 0
