"""Verdicts as JSON lines, in a file or on standard output."""

import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.errors import UsageError
from edge.verdict import Outcome


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="jsonl"):
    """`[[sinks]] kind = "jsonl"`: a JSON object a line."""

    path: str = ""  # standard output


class JsonLines:
    """Appends one JSON object a line to `path`, or to standard output; each line is handed to the system at once."""

    def __init__(self, path: Path | None) -> None:
        try:
            # Unbuffered: a line is one write, so a kill leaves no half line and other writers do not mix with it.
            self._file = path.open("ab", buffering=0) if path else sys.stdout.buffer
        except OSError as error:
            raise UsageError(
                f"cannot write verdicts to {path}: {error.strerror}", "name a file in a folder that exists"
            ) from error

    def send(self, outcome: Outcome) -> None:
        """Append an outcome; OSError when the disk or the reader refuses it."""
        self._file.write(msgspec.json.encode(outcome) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; standard output stays open."""
        if self._file is not sys.stdout.buffer:
            self._file.close()
