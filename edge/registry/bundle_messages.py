"""What is said about a bundle on its way to a line: JSON, on the topics of `broker_config.protocol.topics`."""

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.messages import Digest, Manifest
from broker_config.transfer.blob_transfer import CHUNK

LARGEST = 512 << 20  # bytes of a bundle
FILES = 16  # of a bundle, at most
Sender = Annotated[str, Meta(pattern=r"^sender-[0-9a-f]{16}\Z")]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[arrival]` of a line's settings: the plant's own broker, over which new bundles come."""

    url: str
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    activate: bool = True  # what the gate lets pass; else it is only stored


class File(Struct, frozen=True):
    """A file of a bundle, as a blob."""

    name: str
    digest: Digest
    size: Annotated[int, Meta(ge=1, le=LARGEST)]  # bytes


class Offer(Struct, frozen=True, kw_only=True):
    """Whoever has a bundle -> the line: it can be fetched from `sender`, file by file."""

    sender: Sender
    chunk_size: Annotated[int, Meta(ge=1024, le=CHUNK)]  # bytes
    files: Annotated[tuple[File, ...], Meta(min_length=1, max_length=FILES)]


class Addressed(Struct, frozen=True):
    """Of an offer that cannot be read, whom to tell."""

    sender: Sender


class Answer(Struct, frozen=True, kw_only=True):
    """The line -> a sender: how it goes. After anything but `fetching` the line is done with the offer."""

    sender: str
    state: Literal["fetching", "busy", "active", "stored", "refused"]
    text: str = ""
    remedy: str = ""
    findings: tuple[str, ...] = ()


def blobs(offer: Offer, names: Iterable[str]) -> list[Manifest]:
    """Some of the offered files, as a blob transfer fetches them."""
    return [
        Manifest(
            federation="lines", run="0" * 16, round=0, node=offer.sender,
            digest=each.digest, size=each.size, chunk_size=offer.chunk_size,
        )
        for each in offer.files
        if each.name in names
    ]  # fmt: skip


def encode(message: Offer | Answer) -> bytes:
    """As it travels."""
    return msgspec.json.encode(message)
