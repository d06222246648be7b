"""Identity and progress of a node, and its confirmed class names, durable in its state folder. Without torch."""

import secrets
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Digest, Manifest
from broker_config.storage import disk

T = TypeVar("T")
_IDENTITY, _PROGRESS, _ALONE, ALIASES = "identity.json", "progress.json", "alone.json", "aliases.json"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a state folder for its lifetime, and `session` of the `incarnation`-th process that uses it."""

    identity: str
    incarnation: int
    session: str


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a node. A restarted node resumes from here."""

    run: str
    round: int
    stage: Literal["contributed", "refined"]
    state: str  # file name of the State
    broadcast: Manifest  # that the round started from
    weight: float
    blob: Manifest | None  # the contribution
    history: tuple[dict[str, float], ...]  # metrics of each round so far, the open one included
    counted: bool | None = None  # whether the run's result holds the node's part of the last round, once that is known
    images: str = ""  # digest of the images and labels that the node had


class AloneProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the training without others, for comparison."""

    run: str
    round: Annotated[int, msgspec.Meta(ge=0)]
    initial: Digest  # of the file of the encoder that it began with
    state: Digest | None  # of the file of the State after that round; None before the first


def load_identity(folder: Path) -> Identity | None:
    """The identity of the process that used the folder last; None if it is new."""
    return _read(folder / _IDENTITY, Identity)


def begin_session(folder: Path) -> Identity:
    """Write down that a new process uses the folder, and return its identity."""
    last = load_identity(folder)
    new = Identity(
        identity=last.identity if last else secrets.token_hex(8),
        incarnation=last.incarnation + 1 if last else 1,
        session=secrets.token_hex(8),
    )
    _write(folder / _IDENTITY, new)
    return new


def load_progress(folder: Path, run: str) -> Progress | None:
    """Progress of the node in this run; None if it has not contributed to it."""
    found = _read(folder / _PROGRESS, Progress)
    return found if found and found.run == run else None


def save_progress(folder: Path, reached: Progress) -> None:
    """Write down how far the node is."""
    _write(folder / _PROGRESS, reached)


def load_alone(folder: Path, run: str) -> AloneProgress | None:
    """Progress of the training without others in this run; None if it has not begun, or its file is damaged."""
    try:
        found = _read(folder / _ALONE, AloneProgress)
    except EdgeNodeError:
        return None
    return found if found and found.run == run else None


def save_alone(folder: Path, reached: AloneProgress) -> None:
    """Write down how far the training without others is."""
    _write(folder / _ALONE, reached)


def load_aliases(folder: Path) -> dict[str, str]:
    """The classes that a person has confirmed for folders that are called otherwise."""
    return _read(folder / ALIASES, dict[str, str]) or {}


def confirm_alias(folder: Path, name: str, class_name: str) -> None:
    """Write down that a person has confirmed a folder's class."""
    _write(folder / ALIASES, load_aliases(folder) | {name: class_name})


def _write(path: Path, value: object) -> None:
    """Replace the file durably: after a kill it is the old one or the new one, whole."""
    with disk.writing(path.parent):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # before a session locks it
        disk.replace_bytes(path, msgspec.json.encode(value))


def _read(path: Path, expect: type[T]) -> T | None:
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=expect)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EdgeNodeError(f"{path} is damaged ({error})", "remove this state folder and join again") from error
