"""Secret and account of a node of private federations, durable in its state folder."""

import secrets
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from broker_config.protocol.errors import EdgeNodeError
from broker_config.storage import checksums, disk
from trainer.privacy.account import Account, Release

_FILE = "privacy.json"


class _Kept(Struct, frozen=True, kw_only=True):
    secret: str
    releases: list[Release] = []


class Opened(NamedTuple):
    """The secret, 64 hexadecimal digits, and the account."""

    secret: str
    account: Account


def spent(folder: Path) -> float:
    """The epsilon that the folder's node has spent of its images so far.

    EdgeNodeError if that is damaged.
    """
    releases = found.releases if (found := _read(folder)) else ()
    return Account(releases).epsilon


def open_account(folder: Path, most: float = inf) -> Opened:
    """The folder's secret and account, made if there are none; no more than `most` may be spent.

    Raises:
        EdgeNodeError: they are damaged: another secret would draw other noise for what was said
            before.
    """
    found = _read(folder)
    if found is None:
        found = _Kept(secret=secrets.token_hex(32))
        _write(folder, found)
    secret = found.secret

    def keep(releases: Sequence[Release]) -> None:
        _write(folder, _Kept(secret=secret, releases=[*releases]))

    return Opened(secret, Account(found.releases, keep, most))


def _read(folder: Path) -> _Kept | None:
    path = folder / _FILE
    try:
        return checksums.read_record(path, _Kept)
    except checksums.DamagedError as error:
        raise EdgeNodeError(
            f"the account of what this plant's images have told, {path}, is damaged: {error}",
            "restore it from a copy; without one, what was spent before is not known any more: "
            "remove it only to take part in a new run, and count what it costs on top",
        ) from error


def _write(folder: Path, kept: _Kept) -> None:
    with disk.writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        checksums.write_record(folder / _FILE, kept)
