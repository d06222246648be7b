"""Messages of bundle delivery to a line: JSON, on the topics of `topics.py`."""

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.messages import Digest, Manifest
from broker_config.transfer.blob_transfer import CHUNK

MAX_BYTES = 512 << 20  # of a bundle
MAX_FILES = 16  # of a bundle
Sender = Annotated[str, Meta(pattern=r"^sender-[0-9a-f]{16}\Z")]


class File(Struct, frozen=True):
    """A file of a bundle, as a blob."""

    name: str
    digest: Digest
    size: Annotated[int, Meta(ge=1, le=MAX_BYTES)]  # bytes


class Offer(Struct, frozen=True, kw_only=True):
    """Sender -> line: a bundle that can be fetched from `sender`, file by file."""

    sender: Sender
    chunk_size: Annotated[int, Meta(ge=1024, le=CHUNK)]  # bytes
    files: Annotated[tuple[File, ...], Meta(min_length=1, max_length=MAX_FILES)]


class Addressee(Struct, frozen=True):
    """The recipient of a refusal, taken from an offer that cannot be read otherwise."""

    sender: Sender


class Answer(Struct, frozen=True, kw_only=True):
    """Line -> sender: progress or result. Any state but `fetching` is final for the offer."""

    sender: str
    state: Literal["fetching", "busy", "active", "stored", "refused"]
    text: str = ""
    remedy: str = ""
    findings: tuple[str, ...] = ()


def blob_manifests(offer: Offer, names: Iterable[str]) -> list[Manifest]:
    """Some of the offered files, as a blob transfer fetches them."""
    return [
        Manifest(
            federation="lines",
            run="0" * 16,
            round=0,
            node=offer.sender,
            digest=each.digest,
            size=each.size,
            chunk_size=offer.chunk_size,
        )
        for each in offer.files
        if each.name in names
    ]


def encode(message: Offer | Answer) -> bytes:
    """The payload of a message."""
    return msgspec.json.encode(message)
