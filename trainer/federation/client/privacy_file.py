"""Secret and account of a node of private federations, durable in its state folder.

They are kept twice: an older copy in the place of one file must not make the node forget what it
has spent.
"""

import secrets
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from broker_config.protocol.errors import EdgeNodeError
from broker_config.storage import checksums, disk
from trainer.privacy.spent_account import Account, Release

_FILES = ("privacy.json", "privacy-copy.json")


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
    _write(folder, found)  # one of the two copies may be damaged
    secret = found.secret

    def keep(releases: Sequence[Release]) -> None:
        _write(folder, _Kept(secret=secret, releases=[*releases]))

    return Opened(secret, Account(found.releases, keep, most))


def check_account(folder: Path, account: Account, run: str) -> None:
    """Check that the account knows a run that the folder's node has contributed to.

    Raises:
        EdgeNodeError: it does not: its files were removed, and a new secret would draw other noise
            for what was said before.
    """
    if not account.knows(run):
        raise EdgeNodeError(
            f"this node has contributed to run {run}, and {folder / _FILES[0]}, which knew what "
            "that has spent, is not there any more",
            f"put {_FILES[0]} back from the newest copy of {folder}; without one, take part in a "
            "new run only, and count what it costs on top",
        )


def _read(folder: Path) -> _Kept | None:
    paths = [folder / name for name in _FILES]
    try:
        found = checksums.read_copies(paths, _Kept)
    except checksums.DamagedError as error:
        raise EdgeNodeError(
            f"the account of what this plant's images have told, {paths[0]} and its copy, is "
            f"damaged: {error}",
            f"restore {paths[0]} from a copy, the newest; without one, what was spent before is "
            f"not known any more: remove {paths[0]} and {paths[1]} only to take part in a new run, "
            "and count what it costs on top",
        ) from error
    return max(found, key=_count_writes, default=None)


def _count_writes(kept: _Kept) -> tuple[int, int]:
    """Return what only grows: the releases, and those of them whose bytes are known."""
    return len(kept.releases), sum(bool(each.digest) for each in kept.releases)


def _write(folder: Path, kept: _Kept) -> None:
    with disk.writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        checksums.write_copies([folder / name for name in _FILES], kept)
