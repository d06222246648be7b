"""The line's log: text or JSON lines, on standard error (which journald collects) or in files that rotate."""

import contextlib
import logging
import logging.handlers
import os
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple, TextIO

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.errors import UsageError, printable

_BURST = 10  # lines from one place in the source within _WINDOW; those after them are counted only
_WINDOW = 60.0  # seconds
_PRIORITIES = {"CRITICAL": 2, "ERROR": 3, "WARNING": 4, "INFO": 6, "DEBUG": 7}  # sd-daemon(3)
_STANDARD = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[log]`: what the daemon tells of itself, and where."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "warning"
    path: str = ""  # standard error
    megabytes: Annotated[float, Meta(ge=0)] = 10  # of the file, until it is put aside; 0: it only grows
    backups: Annotated[int, Meta(ge=1)] = 5  # files put aside: PATH.1 is the youngest


class Log:
    """The root of all loggers, as the settings want it, until it is closed."""

    def __init__(self, settings: Settings) -> None:
        """UsageError when the file cannot be written."""
        self._handler: logging.Handler | None = None
        self.become(settings)

    def become(self, settings: Settings) -> None:
        """Go on as the settings want it, in a file opened anew; UsageError, and as before, when it cannot be."""
        handler = _Limited(_opened(settings))
        self.settings = settings
        root = logging.getLogger()
        self.close()
        self._handler = handler
        root.addHandler(handler)
        root.setLevel(settings.level.upper())

    def close(self) -> None:
        """Write what was held back."""
        if self._handler:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None


def _opened(settings: Settings) -> logging.Handler:
    journal = not settings.path and goes_to_journal(os.environ, sys.stderr)
    form = _JsonLines(journal) if settings.format == "json" else _Text(journal)
    if settings.path:
        try:
            handler: logging.Handler = _File(
                settings.path, maxBytes=int(settings.megabytes * 1e6), backupCount=settings.backups, encoding="utf-8"
            )
        except OSError as error:
            raise UsageError(
                f"cannot write the log to {settings.path}: {error.strerror}",
                "name a file in a folder that exists and may be written",
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


class _File(logging.handlers.RotatingFileHandler):
    """A file that rotates; what cannot be written there goes to standard error."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """The disk is full, say."""
        print(self.format(record), file=sys.stderr, flush=True)

    def close(self) -> None:
        """What the disk does not take at the end was told already."""
        with contextlib.suppress(OSError):
            super().close()


class _Formatter(logging.Formatter):
    """Prepares each line for journald, if it is the reader: with its priority in front."""

    def __init__(self, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record, without control characters."""
        lines = self.lines(record)
        prefix = f"<{_PRIORITIES.get(record.levelname, 6)}>" if self._journal else ""
        return "\n".join(prefix + printable(line, keep="\t") for line in lines)

    def lines(self, record: logging.LogRecord) -> list[str]:
        """The record, a line each."""
        raise NotImplementedError


class _Text(_Formatter):
    """For people: time, level, message, and a traceback in further lines."""

    def lines(self, record: logging.LogRecord) -> list[str]:
        """Journald knows the time itself."""
        stamp = "" if self._journal else f"{_time(record)} {record.levelname.lower()}: "
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        message = " ".join(record.getMessage().split())
        return [f"{stamp}{message}{f' ({fields})' if fields else ''}", *_traceback(record)]


class _JsonLines(_Formatter):
    """For machines: an object a record, with the fields that it was given (`extra`)."""

    def lines(self, record: logging.LogRecord) -> list[str]:
        """One line."""
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
    """What the caller added; names with an underscore in front are libraries' own marks on every record, as ray's."""
    return {
        name: value for name, value in record.__dict__.items() if name not in _STANDARD and not name.startswith("_")
    }


def _traceback(record: logging.LogRecord) -> list[str]:
    if not (record.exc_info and record.exc_info[0]):
        return []
    return "".join(traceback.format_exception(*record.exc_info)).splitlines()


class _Window(NamedTuple):
    """What one place in the source has said since `begun`."""

    begun: float
    lines: int
    last: logging.LogRecord


class _Limited(logging.Handler):
    """Passes on the first lines from each place in the source, then says from time to time how many there were more."""

    def __init__(self, to: logging.Handler) -> None:
        super().__init__()
        self._to = to
        self._windows: dict[tuple[str, int], _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Pass it on, or count it."""
        now = time.monotonic()
        for place, window in [*self._windows.items()]:
            if now - window.begun >= _WINDOW:
                self._end(place)
        place = (record.pathname, record.lineno)
        begun, count, _ = self._windows.get(place, _Window(now, 0, record))
        self._windows[place] = _Window(begun, count + 1, record)
        if count < _BURST:
            self._to.handle(record)

    def close(self) -> None:
        """Say what was counted, and close the file."""
        self.acquire()
        try:
            for place in [*self._windows]:
                self._end(place)
            self._to.close()
        finally:
            self.release()
        super().close()

    def _end(self, place: tuple[str, int]) -> None:
        """Show the last of those that were not passed on, and how many it stands for."""
        _, count, last = self._windows.pop(place)
        if count > _BURST:
            last.__dict__["repeated"] = count - _BURST
            self._to.handle(last)
