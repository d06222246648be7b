"""The signed list of a federation's members and their public keys: the charter of kits, trust files and bundles."""

import contextlib
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.codec import ENVELOPE_HEADER, ENVELOPE_MARK
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Name
from broker_config.security import delegation
from broker_config.security.signing import ForgedError, PublicKey, SigningKey

Moment = Annotated[datetime, Meta(tz=True)]
_CONTEXT = "charter"
_REMEDY = "take a newer one from whoever provisions the federation"


class MemberListError(UsageError):
    """A member list that cannot be relied on; says why, and what to do."""


class Member(Struct, frozen=True):
    """One member: the public key of its signatures, and when its certificate expires."""

    key: PublicKey
    expires: Moment


class MemberList(Struct, frozen=True, kw_only=True):
    """The members of a federation. A newer list has a higher version; who is missing from it is no member any more."""

    federation: Name
    version: Annotated[int, Meta(ge=1)]
    issued: Moment
    expires: Moment
    coordinator: Member
    nodes: dict[Name, Member]
    grant: int = 0  # version of the newest grant, which says who may sign beside the first administrator; 0: nobody

    @property
    def rank(self) -> tuple[int, int]:
        """Which list is newer: a deputy who was withdrawn makes no list that is newer than those without him."""
        return self.grant, self.version

    def key(self, name: str) -> str | None:
        """The public key of `coordinator` or of a node; None for a stranger."""
        member = self.coordinator if name == "coordinator" else self.nodes.get(name)
        return member.key if member else None


def sign(members: MemberList, key: SigningKey, grant: bytes = b"") -> bytes:
    """The list signed by the authority: by a deputy if there is a `grant`."""
    return delegation.sign(key, grant, _CONTEXT, msgspec.json.encode(members))


def verify(data: bytes, authority: str, source: str) -> MemberList:
    """Return the list in `data`, which the owner of the public key `authority`, or a deputy, must have signed.

    Raises:
        MemberListError: it is forged, damaged or has expired; `source` names where it comes from.
    """
    members = verify_signature(data, authority, source)
    check_expiry(members, source)
    return members


def verify_signature(data: bytes, authority: str, source: str) -> MemberList:
    """As `verify`, but it may have expired: whether that matters depends on there being a newer one."""
    try:
        content, grant = delegation.open_signed(authority, _CONTEXT, data)
        found = msgspec.json.decode(content, type=MemberList)
        if grant and (grant.version, grant.federation) != (found.grant, found.federation):
            raise ForgedError("its grant is another than it says")
        return found
    except (ForgedError, msgspec.MsgspecError) as error:
        foreign = ": it is of another authority (another federation of this name?), or damaged"
        why = f"{error}{foreign if _is_whole(data) else ''}"
        raise MemberListError(f"the charter in {source} cannot be relied on: {why}", _REMEDY) from None


def _is_whole(data: bytes) -> bool:
    """Whether this is a member list, whoever has signed it; damaged data seldom is."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return data.startswith(ENVELOPE_MARK) and bool(msgspec.json.decode(data[ENVELOPE_HEADER:], type=MemberList))
    return False


def check_expiry(members: MemberList, source: str) -> None:
    """Raise MemberListError if the list has expired."""
    if members.expires < datetime.now(UTC):
        raise MemberListError(f"the charter in {source} has expired on {members.expires:%Y-%m-%d}", _REMEDY)
