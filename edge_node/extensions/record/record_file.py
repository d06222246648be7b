"""Exported records: a file with a record's entries, a line each, and a last line with its head.

Who exports it with a kit signs the head, and the kit's member list stands beside, which says whose
key that is.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import RecordHead
from broker_config.security.kit import Kit
from broker_config.security.message_signing import MessageSigner
from broker_config.storage import disk, hash_chain
from broker_config.storage.hash_chain import ChainError, Entry
from edge.registry import line_record
from edge.registry.bundle_store import BundleStore
from edge_node.extensions.record.history import ContradictionError, History
from trainer.federation.server import journal
from trainer.federation.server.record_facts import as_entry

_MARK = b'{"seal":'
ASK = (
    "ask its owner for another copy, and compare both with what others keep: bundles, heads, "
    "older exports"
)


class RefusedError(EdgeNodeError):
    """What was found to be false; says where, and what to do."""


class Seal(Struct, frozen=True, kw_only=True):
    """Last line of an exported record: without it, the end is missing."""

    head: RecordHead
    federation: str = ""
    name: str = ""  # of the member that has signed the head; empty: nobody has
    charter: bytes = b""  # its member list, signed by the authority


def stored_lines(folder: Path) -> Iterator[bytes]:
    """The record of a coordinator's state folder, or of a line's: its own,
    or that with its bundles.

    Raises:
        UsageError: there is none, or of several lines.
        EdgeNodeError: it cannot be read.
        OSError, ChainError: likewise.
    """
    if is_coordinator(folder):
        for line, _ in hash_chain.chain(map(as_entry, journal.settled(folder))):
            yield line
        return
    stores = line_stores(folder)
    if len(stores) != 1:
        remedy = (
            f"name one: {' or '.join(map(str, stores))}"
            if stores
            else ("pass the --state folder of edge-node coordinate, or that of a line")
        )
        raise UsageError(f"{folder} holds the records of {len(stores) or 'no'} lines", remedy)
    yield from line_record.read(stores[0], BundleStore(stores[0]).state().history)


def is_coordinator(folder: Path) -> bool:
    """Whether a folder is a coordinator's state."""
    return (folder / journal.Journal.FILE).is_file()


def line_stores(folder: Path) -> list[Path]:
    """The stores of lines in a state folder, or the folder itself if it is one."""
    collected_line_stores = []
    for pattern in ("", "bundles/*/"):
        for path in folder.glob(f"{pattern}state.json"):
            collected_line_stores.append(path.parent)
    return sorted(collected_line_stores)


def export(folder: Path, out: Path, kit: Kit | None) -> RecordHead:
    """Write the record of a state folder to a file, its head signed by the kit's owner;
    return the head.

    Raises:
        EdgeNodeError: as `stored_lines`; it is damaged; there is no entry yet; the kit's owner may
            not sign it; or `out` cannot be written.
    """
    signer = MessageSigner(kit) if kit else None
    head: RecordHead | None = None
    history = History()

    def write(scratch: Path) -> None:
        nonlocal head
        with scratch.open("wb") as file:

            def written() -> Iterator[bytes]:
                for line in stored_lines(folder):
                    file.write(line + b"\n")
                    yield line

            for entry, newest in hash_chain.follow(written()):
                head = newest
                add_entry(history, entry, newest.entries, folder)
            if head is None:
                raise UsageError(
                    f"the record in {folder} has no entry yet",
                    "export it once something has happened",
                )
            head = signer.sign_head(head) if signer else head
            seal = Seal(head=head)
            if kit and head.signature:
                _check_signer(history, kit, folder)
                seal = Seal(
                    head=head, federation=kit.federation, name=kit.name, charter=kit.charter
                )
            file.write(hash_chain.encode({"seal": msgspec.to_builtins(seal)}) + b"\n")

    try:
        with disk.writing(out.parent):
            disk.replace(out, write)
    except ChainError as error:
        raise RefusedError(
            f"{folder} is not what was written: {error}", "restore it from a copy"
        ) from None
    assert head is not None
    return head


def add_entry(history: History, entry: Entry, number: int, source: Path) -> None:
    """Add the entry of this number to what is known of the record in `source`.

    Raises:
        RefusedError: it may not stand there.
    """
    try:
        history.add(entry)
    except ContradictionError as error:
        raise RefusedError(
            f"the record {source} contradicts itself: entry {number} cannot stand there: {error}",
            f"believe no entry from that one on; {ASK}",
        ) from None


def _check_signer(history: History, kit: Kit, folder: Path) -> None:
    """Raise UsageError unless the kit's owner may sign the record of `folder`."""
    try:
        history.check_signer(kit.name, kit.federation)
    except ContradictionError as error:
        raise UsageError(
            f"the record of {folder} is not {kit.name}'s to sign: {error}",
            "pass the --kit of its owner: the coordinator of its federation, or the line's node",
        ) from None


class RecordFile:
    """An exported record; `seal` is there once all `lines` were read,
    unless the file was cut off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seal: Seal | None = None

    def lines(self) -> Iterator[bytes]:
        """The entries. OSError, or ChainError: the file is no record."""
        for line in hash_chain.read_lines(self._path):
            if self.seal:
                raise ChainError("something follows its last line")
            if not line.startswith(_MARK):
                yield line
                continue
            try:
                self.seal = msgspec.convert(hash_chain.decode(line)["seal"], Seal)
            except (ValueError, msgspec.ValidationError) as error:
                raise ChainError(f"its last line cannot be read: {error}") from None
