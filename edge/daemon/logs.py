"""The line's log: text or JSON lines, to standard error
(which journald collects) or to rotating files.
"""

import contextlib
import logging
import logging.handlers
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple, TextIO

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.errors import UsageError, replace_unprintable

_BURST = 10  # lines from one place in the source within _WINDOW; further ones are only counted
_WINDOW = 60.0  # seconds
_PRIORITIES = {"CRITICAL": 2, "ERROR": 3, "WARNING": 4, "INFO": 6, "DEBUG": 7}  # sd-daemon(3)
_STANDARD = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[log]`: what the daemon logs, and where."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "warning"
    path: str = ""  # standard error
    megabytes: Annotated[float, Meta(ge=0)] = 10  # of the file, until it is rotated; 0: never
    backups: Annotated[int, Meta(ge=1)] = 5  # rotated files: PATH.1 is the newest


class Log:
    """Configuration of the root logger, until it is closed."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        """UsageError when the file cannot be written.

        `clock` tells the seconds in which lines are counted.
        """
        self._handler: logging.Handler | None = None
        self._clock = clock
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Log as these settings say, to a file opened anew; UsageError, and no change,
        when that is impossible.
        """
        handler = _RateLimited(_open_handler(settings), self._clock)
        self.settings = settings
        root = logging.getLogger()
        self.close()
        self._handler = handler
        root.addHandler(handler)
        root.setLevel(settings.level.upper())

    def close(self) -> None:
        """Write what is still buffered."""
        if self._handler:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None


def _open_handler(settings: Settings) -> logging.Handler:
    journal = not settings.path and goes_to_journal(os.environ, sys.stderr)
    form = _JsonLines(journal) if settings.format == "json" else _Text(journal)
    if settings.path:
        try:
            handler: logging.Handler = _RotatingFile(
                settings.path,
                maxBytes=int(settings.megabytes * 1e6),
                backupCount=settings.backups,
                encoding="utf-8",
            )
        except OSError as error:
            raise UsageError(
                f"cannot write the log to {settings.path}: {error.strerror}",
                "name a file in a folder that exists and may be written, on a disk with room",
            ) from error
    else:
        handler = logging.StreamHandler()
    handler.setFormatter(form)
    return handler


def goes_to_journal(environment: Mapping[str, str], stream: TextIO) -> bool:
    """Whether journald reads the stream, as JOURNAL_STREAM (device:inode) says."""
    try:
        found = os.fstat(stream.fileno())
    except OSError:  # closed, or no file at all
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class _RotatingFile(logging.handlers.RotatingFileHandler):
    """A rotating file; what cannot be written to it goes to standard error."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """Print the record instead, as when the disk is full."""
        print(self.format(record), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the file; errors of the disk have been reported already."""
        with contextlib.suppress(OSError):
            super().close()


class _Formatter(logging.Formatter):
    """Prefixes each line with its priority, if journald reads it."""

    def __init__(self, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record, without control characters."""
        lines = self.format_lines(record)
        prefix = f"<{_PRIORITIES.get(record.levelname, 6)}>" if self._journal else ""
        return "\n".join(prefix + replace_unprintable(line, keep="\t") for line in lines)

    def format_lines(self, record: logging.LogRecord) -> list[str]:
        """The lines of the record."""
        raise NotImplementedError


class _Text(_Formatter):
    """For people: time, level and message, then a traceback on further lines."""

    def format_lines(self, record: logging.LogRecord) -> list[str]:
        """The lines, without time and level for journald, which adds them."""
        stamp = "" if self._journal else f"{_time(record)} {record.levelname.lower()}: "
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        message = " ".join(record.getMessage().split())
        fields_text = f" ({fields})" if fields else ""
        return [f"{stamp}{message}{fields_text}", *_traceback(record)]


class _JsonLines(_Formatter):
    """For machines: an object for each record, with its `extra` fields."""

    def format_lines(self, record: logging.LogRecord) -> list[str]:
        """The record as one JSON line."""
        content = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := _traceback(record):
            content["traceback"] = "\n".join(found)
        return [msgspec.json.encode(_fields(record) | content, enc_hook=str).decode()]


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The `extra` fields; libraries such as ray mark every record with names that begin with an
    underscore.
    """
    return {
        name: value
        for name, value in record.__dict__.items()
        if name not in _STANDARD and not name.startswith("_")
    }


def _traceback(record: logging.LogRecord) -> list[str]:
    if not (record.exc_info and record.exc_info[0]):
        return []
    return "".join(traceback.format_exception(*record.exc_info)).splitlines()


class _Window(NamedTuple):
    """The lines that one place in the source has logged since `begun`."""

    begun: float
    lines: int
    last: logging.LogRecord


class _RateLimited(logging.Handler):
    """Passes on the first lines from each place in the source in a window,
    then only the number of further ones.
    """

    def __init__(self, to: logging.Handler, clock: Callable[[], float]) -> None:
        super().__init__()
        self._to = to
        self._clock = clock
        self._windows: dict[tuple[str, int], _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Pass it on, or count it."""
        now = self._clock()
        for place, window in [*self._windows.items()]:
            if now - window.begun >= _WINDOW:
                self._end(place)
        place = (record.pathname, record.lineno)
        begun, count, _ = self._windows.get(place, _Window(now, 0, record))
        self._windows[place] = _Window(begun, count + 1, record)
        if count < _BURST:
            self._to.handle(record)

    def close(self) -> None:
        """Report what was counted, and close the file."""
        self.acquire()
        try:
            for place in [*self._windows]:
                self._end(place)
            self._to.close()
        finally:
            self.release()
        super().close()

    def _end(self, place: tuple[str, int]) -> None:
        """Pass on the last line that was held back, with the number that it stands for."""
        _, count, last = self._windows.pop(place)
        if count > _BURST:
            last.__dict__["repeated"] = count - _BURST
            self._to.handle(last)
