"""Signatures of a federation's authority: of its first administrator, or of a deputy whom that one has named.

Members know the first administrator's public key alone. What it signs is an ordinary envelope. What a deputy signs has
the first one's grant in front, which lists the deputies: 0x02, the grant's length in four bytes (big-endian), the
grant, the deputy's envelope.
"""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.messages import Digest, Name
from broker_config.security.signing import ForgedError, PublicKey, SigningKey, open_envelope

_MARK = b"\x02"
_CONTEXT = "grant"
_LENGTH = 4  # bytes


class Grant(Struct, frozen=True, kw_only=True):
    """Who may sign for the authority beside the first administrator. A newer grant has a higher version."""

    federation: Name
    version: Annotated[int, Meta(ge=1)]
    ca: Digest  # of the first administrator's CA certificate (PEM)
    deputies: dict[PublicKey, Digest]  # likewise


class Opened(NamedTuple):
    """What was signed, and the grant with which a deputy has signed it; None: the first administrator has."""

    content: bytes
    grant: Grant | None


def sign_grant(grant: Grant, first: SigningKey) -> bytes:
    """The grant in an envelope signed by the first administrator."""
    return first.sign_envelope(_CONTEXT, msgspec.json.encode(grant))


def open_grant(data: bytes, authority: str) -> Grant:
    """A grant; ForgedError unless the owner of `authority`, the first administrator, has signed it."""
    try:
        return msgspec.json.decode(open_envelope(authority, _CONTEXT, data), type=Grant)
    except msgspec.MsgspecError as error:
        raise ForgedError(f"its grant cannot be read: {error}") from None


def sign(key: SigningKey, grant: bytes, context: str, content: bytes) -> bytes:
    """Sign `content` for this context, as a deputy if there is a `grant`."""
    envelope = key.sign_envelope(context, content)
    return b"".join((_MARK, len(grant).to_bytes(_LENGTH), grant, envelope)) if grant else envelope


def open_signed(authority: str, context: str, data: bytes) -> Opened:
    """What was signed for this context by the owner of `authority`, or by a deputy of its; else ForgedError."""
    if not data.startswith(_MARK):
        return Opened(open_envelope(authority, context, data), None)
    start = len(_MARK) + _LENGTH
    end = start + int.from_bytes(data[len(_MARK) : start])
    grant = open_grant(data[start:end], authority)
    for deputy in grant.deputies:
        try:
            return Opened(open_envelope(deputy, context, data[end:]), grant)
        except ForgedError:
            continue
    raise ForgedError("none of the authority's administrators has signed it")
