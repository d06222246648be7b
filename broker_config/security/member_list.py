"""The signed list of a federation's members and their public keys: the charter of kits,
trust files and bundles.
"""

import contextlib
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.codec import ENVELOPE_HEADER, ENVELOPE_MARK
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Name
from broker_config.security.signing import ForgedError, PublicKey, SigningKey, open_envelope

Moment = Annotated[datetime, Meta(tz=True)]
_CONTEXT = "charter"
_REMEDY = "take a newer one from whoever provisions the federation"
_GRANT_MARK = b"\x02"  # began what a second administrator had signed


class MemberListError(UsageError):
    """A member list that cannot be relied on; says why, and what to do."""


class Member(Struct, frozen=True):
    """One member: the public key of its signatures, and when its certificate expires."""

    key: PublicKey
    expires: Moment


class MemberList(Struct, frozen=True, kw_only=True):
    """The members of a federation.

    A newer list has a higher version; who is missing from it is no member any more.
    """

    federation: Name
    version: Annotated[int, Meta(ge=1)]
    issued: Moment
    expires: Moment
    coordinator: Member
    nodes: dict[Name, Member]

    def key(self, name: str) -> str | None:
        """The public key of `coordinator` or of a node; None for a stranger."""
        member = self.coordinator if name == "coordinator" else self.nodes.get(name)
        return member.key if member else None


class _RetiredFields(Struct, frozen=True):
    """Fields of federations with several administrators, which this version does not know."""

    grant: int = 0


def sign(members: MemberList, key: SigningKey) -> bytes:
    """Return the list, signed by the authority."""
    return key.sign_envelope(_CONTEXT, msgspec.json.encode(members))


def verify(data: bytes, authority: str, source: str) -> MemberList:
    """Return the list in `data`, which the owner of the public key `authority` must have signed.

    Raises:
        MemberListError: it is forged, damaged or has expired; `source` names where it comes from.
    """
    members = verify_signature(data, authority, source)
    check_expiry(members, source)
    return members


def verify_signature(data: bytes, authority: str, source: str) -> MemberList:
    """As `verify`, but it may have expired: whether that matters depends on there being a newer
    one.
    """
    if data.startswith(_GRANT_MARK):
        raise _has_grants(source)
    try:
        content = open_envelope(authority, _CONTEXT, data)
        if msgspec.json.decode(content, type=_RetiredFields).grant:
            raise _has_grants(source)
        return msgspec.json.decode(content, type=MemberList)
    except (ForgedError, msgspec.MsgspecError) as error:
        foreign = ": it is of another authority (another federation of this name?), or damaged"
        remedy = foreign if _is_whole(data) else ""
        why = f"{error}{remedy}"
        raise MemberListError(
            f"the charter in {source} cannot be relied on: {why}", _REMEDY
        ) from None


def _has_grants(source: str) -> MemberListError:
    return MemberListError(
        f"the charter in {source} has a `grant`: this version of edge-node knows one "
        "administrator only",
        "have a new charter made by the version that wrote it, or provision the federation anew",
    )


def _is_whole(data: bytes) -> bool:
    """Whether this is a member list, whoever has signed it; damaged data seldom is."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return data.startswith(ENVELOPE_MARK) and bool(
            msgspec.json.decode(data[ENVELOPE_HEADER:], type=MemberList)
        )
    return False


def check_expiry(members: MemberList, source: str) -> None:
    """Raise MemberListError if the list has expired."""
    if members.expires < datetime.now(UTC):
        raise MemberListError(
            f"the charter in {source} has expired on {members.expires:%Y-%m-%d}", _REMEDY
        )
