"""Files that somebody has sent: read with a limit, and refused with a remedy."""

from pathlib import Path
from typing import TypeVar

import msgspec

from broker_config.protocol.errors import UsageError

_LARGEST = 1 << 24  # bytes
T = TypeVar("T")


def read_json(path: Path, expect: type[T], what: str, again: str) -> T:
    """A JSON file's content; UsageError, in which `what` it should be and how to get it `again`,
    if it is none.
    """
    try:
        return msgspec.json.decode(read_bytes(path, what, again), type=expect)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no {what} ({error})", again) from None


def read_bytes(path: Path, what: str, again: str) -> bytes:
    """As `read_json`, for a file of any kind."""
    try:
        with path.open("rb") as file:  # whoever names it may name a pipe: <(command)
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(
            f"the {what} {path} cannot be read: {error.strerror}", "check the name of the file"
        ) from None
    if len(content) > _LARGEST:
        raise UsageError(f"{path} is too large: no {what} has so many bytes", again)
    return content
