"""Finished cells as JSON lines, in files that git merges and that a kill at any time leaves usable."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from broker_config.protocol.errors import UsageError
from broker_config.storage.disk import writing
from research.afedcl.cell import Finished

_ATTRIBUTES = "*.jsonl merge=union\n"  # git keeps the lines of both sides
T = TypeVar("T", bound=msgspec.Struct)


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """Features of a node's held-out images in two dimensions, and their classes."""

    key: str  # of the cell
    method: str
    node: str
    labels: list[str]
    points: list[tuple[float, float]]


class Records(Generic[T]):
    """A file with a record a line. Several processes may add to it at once."""

    def __init__(self, path: Path, kind: type[T]):
        self._path, self._kind = path, kind

    def __iter__(self) -> Iterator[T]:
        """All of them; UsageError if a line is damaged."""
        if not self._path.exists():
            return
        lines = self._path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):  # what follows the last line break was torn off
            try:
                yield msgspec.json.decode(line, type=self._kind)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise UsageError(f"{self._path} is damaged in line {number}: {error}", "remove that line") from error

    def add(self, records: Sequence[T]) -> None:
        """Append records; they are on the disk when this returns. EdgeNodeError if it does not take them."""
        folder = self._path.parent
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not (attributes := folder / ".gitattributes").exists():
                attributes.write_text(_ATTRIBUTES)
            _append(self._path, msgspec.json.Encoder().encode_lines(records))


class Store:
    """A folder of results. Of equal keys the first counts."""

    def __init__(self, folder: Path):
        self.cells = Records(folder / "cells.jsonl", Finished)
        self._embeddings = Records(folder / "embeddings.jsonl", Embedding)

    def finished(self) -> dict[str, Finished]:
        """All finished cells, by key.

        Raises:
            UsageError: a line is damaged.
        """
        found: dict[str, Finished] = {}
        for each in self.cells:
            found.setdefault(each.key, each)
        return found

    def embeddings(self) -> dict[str, list[Embedding]]:
        """Of each cell that has any, by key and in the order of nodes. Raises UsageError as `finished` does."""
        found: dict[str, dict[str, Embedding]] = {}
        for each in self._embeddings:
            found.setdefault(each.key, {}).setdefault(each.node, each)
        return {key: list(nodes.values()) for key, nodes in found.items()}

    def add(self, finished: Finished, embeddings: list[Embedding]) -> None:
        """Append a cell's results; they are on the disk when this returns. EdgeNodeError if it does not take them."""
        if embeddings:
            self._embeddings.add(embeddings)
        self.cells.add([finished])


def _append(path: Path, lines: bytes) -> None:
    """Add whole lines at the end, where a torn one is removed first."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or we are killed
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.ftruncate(file, path.read_bytes().rfind(b"\n") + 1)
        while lines:
            lines = lines[os.write(file, lines) :]
        os.fsync(file)
    finally:
        os.close(file)
