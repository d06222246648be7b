"""All that an authority knows and has issued, as one value; what the operator asks for makes a new one of it."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from broker_config.protocol.errors import UsageError, nearest
from broker_config.protocol.messages import Name
from broker_config.protocol.topics import COORDINATOR, MONITOR, check_name
from broker_config.security import certificate_authority, member_list
from broker_config.security.certificate_authority import Pair
from broker_config.security.kit import new_passphrase
from broker_config.security.member_list import MemberList, Moment
from broker_config.security.signing import SigningKey

BROKER = "broker"
DUE = timedelta(days=90)  # before its end, a certificate is renewed by `renew_due`
PORT = 8883
# A charter outlives its certificates, since lines have none: a line then needs a new trust file every two years, and
# who never hears of a revocation believes the revoked member for that long at most.
_GRACE = timedelta(days=365)


class Wish(Struct, frozen=True, kw_only=True):
    """What the operator asks for. Empty or None: nothing new."""

    nodes: Sequence[str] = ()  # that there should be
    hosts: Sequence[str] = ()  # of the broker; kits name the first
    port: int | None = None
    broker_folder: str | None = None  # where the broker's files will lie on its machine
    days: int = 365  # that new certificates hold
    renew: Sequence[str] = ()
    renew_due: bool = False
    revoke: Sequence[str] = ()


class Holder(Struct, frozen=True, kw_only=True):
    """A member: its certificate, and what else its kit needs. Printing it tells no secret."""

    pair: Pair
    signing: bytes  # private; empty: it says nothing
    passphrase: str

    def __repr__(self) -> str:
        return f"Holder({self.pair})"


class Issued(Struct, frozen=True, kw_only=True):
    """A certificate that was issued at some time."""

    member: str
    serial: str
    expires: Moment
    revoked: Moment | None = None


class Register(Struct, frozen=True, kw_only=True):
    """The authority's memory: with it all other files can be written again. Printing it tells no secret."""

    federation: Name
    ca: Pair
    charter_key: bytes  # private
    hosts: list[str]
    port: int
    broker_folder: str | None
    broker: Pair
    members: dict[Name, Holder]
    issued: list[Issued]
    version: int = 0  # of the charter and of the list of revoked certificates
    charter: bytes = b""  # the signed member list
    charter_expires: Moment | None = None
    crl: str = ""  # PEM

    def __repr__(self) -> str:
        return f"Register({self.federation})"

    @property
    def nodes(self) -> list[str]:
        """The members that train."""
        return [name for name in self.members if name not in (COORDINATOR, MONITOR)]

    @property
    def url(self) -> str:
        """The broker's, as kits have it."""
        host = self.hosts[0]
        return f"mqtts://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def pairs(self) -> dict[str, Pair]:
        """Every certificate in use, by member; the broker's too."""
        return {BROKER: self.broker, **{name: holder.pair for name, holder in self.members.items()}}

    @property
    def key(self) -> SigningKey:
        """Which signs the charter."""
        return SigningKey(self.charter_key)


def found(federation: str, wish: Wish, now: datetime) -> Register:
    """A federation's first register.

    Raises:
        UsageError: the wish lacks nodes or the broker's host.
    """
    if not wish.nodes:
        raise UsageError("a new federation needs nodes", "name them: --nodes plant-a,plant-b")
    if not wish.hosts:
        raise UsageError(
            "the broker's host is not known yet",
            "give the name or address at which nodes reach it: --host broker.local",
        )
    ca = certificate_authority.found(federation, now)
    broker = certificate_authority.issue_broker(ca, federation, wish.hosts, now, now + timedelta(days=wish.days))
    empty = Register(
        federation=federation,
        ca=ca,
        charter_key=SigningKey.generate().raw,
        hosts=list(wish.hosts),
        port=PORT,
        broker_folder=None,
        broker=broker,
        members={},
        issued=[_record(BROKER, broker)],
    )
    for name in (COORDINATOR, MONITOR):
        empty = _admit(empty, name, wish.days, now)
    return change(empty, wish, now)


def change(register: Register, wish: Wish, now: datetime) -> Register:
    """The register as the wish has it, with a newer charter and list of revoked certificates; else the same one.

    Raises:
        UsageError: the authority has ended, a name does not fit or is unknown.
    """
    if register.ca.expires < now:
        raise UsageError(
            f"the authority of federation {register.federation!r} ended on {register.ca.expires:%Y-%m-%d}",
            "found the federation anew in another folder (--out), and give all members their new kits",
        )
    new = register
    for name in dict.fromkeys(wish.revoke):
        new = _revoke(new, name, wish.days, now)
    for name in dict.fromkeys(wish.nodes):
        if name not in new.nodes:
            new = _admit(new, _check_node(name), wish.days, now)
    new = _move(new, wish, now)
    due = [name for name, pair in new.pairs.items() if wish.renew_due and pair.expires < now + DUE]
    for name in dict.fromkeys([*wish.renew, *due]):
        new = _renew(new, name, wish.days, now)
    return new if new == register and register.version else _sign(new, now)


def _check_node(name: str) -> str:
    if name in (COORDINATOR, MONITOR, BROKER):
        raise UsageError(f"a node cannot be called {name}", "that is somebody else in every federation: choose another")
    return check_name(name, "the node's name")


def _admit(register: Register, name: str, days: int, now: datetime) -> Register:
    """With a new member: new keys, new passphrase."""
    pair = certificate_authority.issue(register.ca, register.federation, name, now, now + timedelta(days=days))
    signing = b"" if name == MONITOR else SigningKey.generate().raw
    holder = Holder(pair=pair, signing=signing, passphrase=new_passphrase())
    return _with(register, name, holder)


def _renew(register: Register, name: str, days: int, now: datetime) -> Register:
    """With a new certificate of a member, or of the broker: all else stays, so that the old one still serves."""
    end = now + timedelta(days=days)
    if name == BROKER:
        # With the key that it has: a power cut between two files leaves a certificate and a key that fit.
        pair = certificate_authority.issue_broker(
            register.ca, register.federation, register.hosts, now, end, key=register.broker.key
        )
        return replace(register, broker=pair, issued=[*register.issued, _record(BROKER, pair)])
    if name not in register.members:
        raise _unknown(register, name)
    pair = certificate_authority.issue(register.ca, register.federation, name, now, end)
    return _with(register, name, replace(register.members[name], pair=pair))


def _revoke(register: Register, name: str, days: int, now: datetime) -> Register:
    """Without a node, and none of its certificates valid any more. Coordinator and monitor get new keys at once."""
    if name == BROKER:
        raise UsageError(
            "the broker's certificate cannot be revoked: members ask for no list before they connect",
            "found the federation anew in another folder (--out)",
        )
    if name not in register.members:
        if any(each.member == name for each in register.issued):
            return register  # is revoked already
        raise _unknown(register, name)
    issued = [
        replace(each, revoked=now) if each.member == name and not each.revoked else each for each in register.issued
    ]
    members = {each: holder for each, holder in register.members.items() if each != name}
    without = replace(register, members=members, issued=issued)
    return _admit(without, name, days, now) if name in (COORDINATOR, MONITOR) else without


def _move(register: Register, wish: Wish, now: datetime) -> Register:
    """With the broker where the wish has it."""
    if wish.port:
        register = replace(register, port=wish.port)
    if wish.broker_folder:
        register = replace(register, broker_folder=wish.broker_folder)
    if wish.hosts and list(wish.hosts) != register.hosts:
        register = _renew(replace(register, hosts=list(wish.hosts)), BROKER, wish.days, now)
    return register


def _with(register: Register, name: str, holder: Holder) -> Register:
    members = {**register.members, name: holder}
    return replace(register, members=members, issued=[*register.issued, _record(name, holder.pair)])


def _record(member: str, pair: Pair) -> Issued:
    return Issued(member=member, serial=pair.serial, expires=pair.expires)


def _unknown(register: Register, name: str) -> UsageError:
    return UsageError(f"federation {register.federation!r} has no member {name!r}", nearest(name, register.pairs))


def _sign(register: Register, now: datetime) -> Register:
    """With a new charter and a new list of revoked certificates."""
    version = register.version + 1
    members = {
        name: member_list.Member(SigningKey(holder.signing).public, holder.pair.expires)
        for name, holder in register.members.items()
        if holder.signing
    }
    charter = MemberList(
        federation=register.federation,
        version=version,
        issued=now,
        expires=min(max(each.expires for each in members.values()) + _GRACE, register.ca.expires),
        coordinator=members.pop(COORDINATOR),
        nodes=members,
    )
    revoked = {each.serial: each.revoked for each in register.issued if each.revoked}
    return replace(
        register,
        version=version,
        charter=member_list.sign(charter, register.key),
        charter_expires=charter.expires,
        crl=certificate_authority.revocations(register.ca, revoked, now, version),
    )
