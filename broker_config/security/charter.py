"""Who belongs to a federation: its members' public keys, signed by its authority."""

import contextlib
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.codec import HEAD, SEALED
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Name
from broker_config.security.signing import ForgedError, SigningKey, unseal

PublicKey = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", description="Ed25519, hexadecimal")]
Moment = Annotated[datetime, Meta(tz=True)]
_CONTEXT = "charter"
_REMEDY = "take a newer one from whoever provisions the federation"


class CharterError(UsageError):
    """A charter that cannot be relied on; says why, and what to do."""


class Member(Struct, frozen=True):
    """One who may speak in a federation: the key of its signatures, and when its certificate ends."""

    key: PublicKey
    expires: Moment


class Charter(Struct, frozen=True, kw_only=True):
    """Who belongs to a federation. A newer one has a higher version; who is not in it any more is out."""

    federation: Name
    version: Annotated[int, Meta(ge=1)]
    issued: Moment
    expires: Moment
    coordinator: Member
    nodes: dict[Name, Member]

    def key(self, who: str) -> str | None:
        """The public key of `coordinator` or of a node; None for a stranger."""
        member = self.coordinator if who == "coordinator" else self.nodes.get(who)
        return member.key if member else None


def seal(charter: Charter, authority: SigningKey) -> bytes:
    """The charter as it travels, signed by the authority."""
    return authority.seal(_CONTEXT, msgspec.json.encode(charter))


def read(data: bytes, authority: str, source: str) -> Charter:
    """Return the charter in `data`; `authority` is the public key that must have signed it.

    Raises:
        CharterError: it is forged, damaged or has expired; `source` names where it comes from.
    """
    charter = opened(data, authority, source)
    check_expiry(charter, source)
    return charter


def opened(data: bytes, authority: str, source: str) -> Charter:
    """As `read`, but it may have expired: whether that matters depends on there being a newer one."""
    try:
        return msgspec.json.decode(unseal(authority, _CONTEXT, data), type=Charter)
    except (ForgedError, msgspec.MsgspecError) as error:
        foreign = ": it is of another authority (another federation of this name?), or damaged"
        why = f"{error}{foreign if _is_whole(data) else ''}"
        raise CharterError(f"the charter in {source} cannot be relied on: {why}", _REMEDY) from None


def _is_whole(data: bytes) -> bool:
    """Whether this is a charter, whoever has signed it; what is damaged most often is none."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return data.startswith(SEALED) and bool(msgspec.json.decode(data[HEAD:], type=Charter))
    return False


def check_expiry(charter: Charter, source: str) -> None:
    """Raise CharterError if the charter has expired."""
    if charter.expires < datetime.now(UTC):
        raise CharterError(f"the charter in {source} has expired on {charter.expires:%Y-%m-%d}", _REMEDY)
