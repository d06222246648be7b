"""A federation's registry of members and issued certificates, as one value;
each change makes a new one.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import chain
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from broker_config.protocol.errors import UsageError, suggest
from broker_config.protocol.messages import Name
from broker_config.protocol.topics import COORDINATOR, MONITOR, check_name
from broker_config.security import certificate_authority, member_list
from broker_config.security.certificate_authority import KeyPair
from broker_config.security.certificate_request import CertificateRequest, request_fingerprint
from broker_config.security.kit import new_passphrase
from broker_config.security.member_list import MemberList, Moment
from broker_config.security.signing import SigningKey, fingerprint

BROKER = "broker"
DUE = timedelta(days=90)  # before its end, a certificate is renewed by `renew_due`
PORT = 8883
# A member list outlives its certificates, since lines have none: a line then needs a new trust file
# every two years, and one that never hears of a revocation believes the revoked member for that
# long at most.
_GRACE = timedelta(days=365)


class ChangeRequest(Struct, frozen=True, kw_only=True):
    """Changes that an administrator requests. Empty or None: no change."""

    nodes: Sequence[str] = ()  # that should be members, with keys made here
    requests: Sequence[CertificateRequest] = ()  # of members that have made their own
    hosts: Sequence[str] = ()  # of the broker; kits name the first
    port: int | None = None
    broker_folder: str | None = None  # where the broker's files will lie on its machine
    days: int = 365  # of validity of new certificates
    renew: Sequence[str] = ()
    renew_due: bool = False
    revoke: Sequence[str] = ()


class RegisteredMember(Struct, frozen=True, kw_only=True):
    """A member: its certificate, and what else its kit needs. Its repr shows no secret.

    Of one that has made its own keys, no private one is known here: it gets an answer and no kit.
    """

    pair: KeyPair
    signing: bytes = b""  # private key
    passphrase: str = ""
    public: str = ""  # key of its signatures, where the private one is not known

    def __repr__(self) -> str:
        return f"RegisteredMember({self.pair})"

    @property
    def has_own_keys(self) -> bool:
        """Whether its keys were made where they are used."""
        return not self.pair.key

    @property
    def keys(self) -> str:
        """What changes with its keys. Passphrases are random and stay with the keys."""
        return self.passphrase or self.pair.public

    @property
    def key_fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of its public keys, one for each key."""
        return _fingerprints(self.pair.public, self.signing_key)

    @property
    def fingerprint(self) -> str:
        """That of its public keys, as whoever has made them sees it."""
        return request_fingerprint(self.pair.public, self.signing_key)

    @property
    def signing_key(self) -> str:
        """The public key of its signatures, hexadecimal; empty: it signs nothing."""
        if self.public or not self.signing:
            return self.public
        return SigningKey(self.signing).public


class IssuedCertificate(Struct, frozen=True, kw_only=True):
    """A certificate that was issued, in use or not."""

    member: str
    serial: str
    expires: Moment
    revoked: Moment | None = None
    # fingerprints of its keys, each by itself; empty: a version that did not keep them issued it
    keys: tuple[str, ...] = ()


class MemberRegistry(Struct, frozen=True, kw_only=True):
    """All that the administrator knows: every other file can be written again from it.

    Its repr shows no secret.
    """

    federation: Name
    ca: KeyPair
    charter_key: bytes  # private
    hosts: list[str]
    port: int
    broker_folder: str | None
    broker: KeyPair
    members: dict[Name, RegisteredMember]
    issued: list[IssuedCertificate]
    version: int = 0  # of the member list and of the revocation list
    charter: bytes = b""  # the signed member list
    charter_expires: Moment | None = None
    crl: str = ""  # PEM

    def __repr__(self) -> str:
        return f"MemberRegistry({self.federation})"

    @property
    def nodes(self) -> list[str]:
        """The members that train."""
        return [name for name in self.members if name not in (COORDINATOR, MONITOR)]

    @property
    def url(self) -> str:
        """The broker's address, as in kits."""
        host = self.hosts[0]
        host_text = f"[{host}]" if ":" in host else host
        return f"mqtts://{host_text}:{self.port}"

    @property
    def pairs(self) -> dict[str, KeyPair]:
        """Every certificate in use, by member; the broker's too."""
        return {BROKER: self.broker, **{name: member.pair for name, member in self.members.items()}}

    @property
    def fingerprint(self) -> str:
        """That of the authority, as members see it."""
        return fingerprint(bytes.fromhex(self.authority))

    @property
    def authority(self) -> str:
        """The public key that members know."""
        return self.key.public

    @property
    def key(self) -> SigningKey:
        """The key with which the authority signs."""
        return SigningKey(self.charter_key)

    @property
    def revoked_keys(self) -> set[str]:
        """Fingerprints of the keys that are certified for nobody any more."""
        revoked = [each.keys for each in self.issued if each.revoked]
        return set(chain.from_iterable(revoked))

    @property
    def revoked(self) -> list[str]:
        """Names of those who are no members any more."""
        return sorted({each.member for each in self.issued} - self.members.keys() - {BROKER})


def create_registry(federation: str, request: ChangeRequest, now: datetime) -> MemberRegistry:
    """A new federation's registry.

    Raises:
        UsageError: the request lacks nodes or the broker's host.
    """
    requested = {each.name for each in request.requests}
    if not request.nodes and not requested - {COORDINATOR, MONITOR}:
        raise UsageError(
            "a new federation needs nodes",
            "pass their requests: --request plant-a.request; or, for a trial, name them: --nodes "
            "plant-a,plant-b",
        )
    if not request.hosts:
        raise UsageError(
            "the broker's host is not known yet",
            "give the name or address at which nodes reach it: --host broker.local",
        )
    ca = certificate_authority.create_authority(federation, now)
    broker = certificate_authority.issue_broker(
        ca, federation, request.hosts, now, now + timedelta(days=request.days)
    )
    empty = MemberRegistry(
        federation=federation,
        ca=ca,
        charter_key=SigningKey.generate().raw,
        hosts=list(request.hosts),
        port=PORT,
        broker_folder=None,
        broker=broker,
        members={},
        issued=[],
    )
    broker_keys = _fingerprints(broker.public)
    empty = replace(empty, issued=[_record(BROKER, broker, broker_keys)])
    for name in (COORDINATOR, MONITOR):
        if name not in requested:
            empty = _admit(empty, name, request.days, now)
    return apply_request(empty, request, now)


def apply_request(
    registry: MemberRegistry, request: ChangeRequest, now: datetime
) -> MemberRegistry:
    """The registry after a request, with a newer member list and revocation list;
    the same one if nothing changes.

    Raises:
        UsageError: the authority's certificate has expired, or a name is not valid, taken or
            unknown.
    """
    if registry.ca.expires < now:
        raise UsageError(
            f"the authority of federation {registry.federation!r} ended on "
            f"{registry.ca.expires:%Y-%m-%d}",
            "found the federation anew in another folder (--out), and give all members their "
            "new kits",
        )
    new = registry
    requested = {each.name for each in request.requests}
    for name in dict.fromkeys(request.revoke):
        new = _revoke(new, name, now)
        if name in (COORDINATOR, MONITOR) and name not in requested:
            new = _admit(new, name, request.days, now)
    for each in request.requests:
        new = _enrol(new, each, request.days, now)
    for name in dict.fromkeys(request.nodes):
        if name not in new.nodes:
            new = _admit(new, _check_node(name), request.days, now)
    new = _move(new, request, now)
    due = [
        name for name, pair in new.pairs.items() if request.renew_due and pair.expires < now + DUE
    ]
    for name in dict.fromkeys([*request.renew, *due]):
        new = _renew(new, name, request.days, now)
    if new != registry or not registry.version:
        return _sign(new, now)
    return new


def _check_node(name: str) -> str:
    if name in (COORDINATOR, MONITOR, BROKER):
        raise UsageError(
            f"a node cannot be called {name}",
            "that is somebody else in every federation: choose another",
        )
    return check_name(name, "the node's name")


def _check_distinct(registry: MemberRegistry, name: str, source: str) -> None:
    """Raise UsageError if a new name differs by its case alone from one that somebody has or had.

    People who compare names would not notice, and some file systems do not either.
    """
    had = {COORDINATOR, MONITOR, BROKER, *(each.member for each in registry.issued)}
    if name in had:
        return
    for other in sorted(had):
        if other.casefold() == name.casefold():
            raise UsageError(
                f"{source} is for {name!r}, which differs from {other!r} by its case alone",
                f"choose a name that differs by more; if {other} is meant, write it so",
            )


def _check_keys(registry: MemberRegistry, request: CertificateRequest, name: str) -> None:
    """Raise UsageError if a key of the request was revoked, or is another member's.

    Each key counts by itself: a new one beside it does not make a stolen one good.
    """
    keys = set(_fingerprints(request.public, request.signing))
    again = (
        f"have new ones made: edge-node request {registry.federation} {name}, in another folder "
        "(--out)"
    )
    if keys & registry.revoked_keys:
        raise UsageError(
            f"the request {request.source} has keys that were revoked, and whoever had them may "
            "have sent it",
            f"{again}; if these keys have already replaced the lost ones, leave out --revoke",
        )
    for other, member in registry.members.items():
        if other != name and keys & {*member.key_fingerprints}:
            raise UsageError(
                f"the request {request.source} has keys of {other}, and {name} needs its own",
                again,
            )


def _fingerprints(*keys: str) -> tuple[str, ...]:
    return tuple(fingerprint(key.encode()) for key in keys if key)


def _admit(registry: MemberRegistry, name: str, days: int, now: datetime) -> MemberRegistry:
    """The registry with a new member, which gets new keys and a new passphrase."""
    _check_distinct(registry, name, "--nodes")
    pair = certificate_authority.issue_member(
        registry.ca, registry.federation, name, now, now + timedelta(days=days)
    )
    signing = b"" if name == MONITOR else SigningKey.generate().raw
    member = RegisteredMember(pair=pair, signing=signing, passphrase=new_passphrase())
    return _with(registry, name, member)


def _enrol(
    registry: MemberRegistry, request: CertificateRequest, days: int, now: datetime
) -> MemberRegistry:
    """The registry with a member that has made its own keys;
    the same one if it is there with these keys.
    """
    if request.federation != registry.federation:
        raise UsageError(
            f"the request {request.source} is for federation {request.federation!r}, not "
            f"{registry.federation!r}",
            f"have it made for this one: edge-node request {registry.federation} NAME",
        )
    name = request.name if request.name in (COORDINATOR, MONITOR) else _check_node(request.name)
    _check_keys(registry, request, name)
    if before := registry.members.get(name):
        if (before.pair.public, before.signing_key) == (request.public, request.signing):
            return registry
        raise UsageError(
            f"the request {request.source} has other keys than {name}, which is a member already",
            f"ask {name} whether it has lost its keys or wants new ones; then replace them: "
            f"--revoke {name} --request {request.source}",
        )
    _check_distinct(registry, name, f"the request {request.source}")
    end = now + timedelta(days=days)
    pair = certificate_authority.issue_member(
        registry.ca, registry.federation, name, now, end, request.public
    )
    return _with(registry, name, RegisteredMember(pair=pair, public=request.signing))


def _renew(registry: MemberRegistry, name: str, days: int, now: datetime) -> MemberRegistry:
    """The registry with a new certificate of a member or the broker.

    Keys that were made elsewhere, and those of signatures, stay: the old kit still works.
    """
    end = now + timedelta(days=days)
    if name == BROKER:
        # With the key that it has: a power cut between two files leaves a certificate and a key
        # that fit.
        pair = certificate_authority.issue_broker(
            registry.ca, registry.federation, registry.hosts, now, end, before=registry.broker
        )
        record = _record(BROKER, pair, _fingerprints(pair.public))
        return replace(registry, broker=pair, issued=[*registry.issued, record])
    if name not in registry.members:
        raise _unknown(registry, name)
    member = registry.members[name]
    public = member.pair.public if member.has_own_keys else ""
    pair = certificate_authority.issue_member(
        registry.ca, registry.federation, name, now, end, public
    )
    return _with(registry, name, replace(member, pair=pair))


def _revoke(registry: MemberRegistry, name: str, now: datetime) -> MemberRegistry:
    """The registry without a member, its certificates revoked."""
    if name == BROKER:
        raise UsageError(
            "the broker's certificate cannot be revoked: members ask for no list before "
            "they connect",
            "found the federation anew in another folder (--out)",
        )
    if name not in registry.members:
        if any(each.member == name for each in registry.issued):
            return registry  # already revoked
        raise _unknown(registry, name)
    current = registry.members[name].key_fingerprints
    issued = []
    for each in registry.issued:
        if each.member == name and not each.revoked:
            issued.append(replace(each, revoked=now, keys=each.keys or current))
        else:
            issued.append(each)
    members = {each: member for each, member in registry.members.items() if each != name}
    return replace(registry, members=members, issued=issued)


def _move(registry: MemberRegistry, request: ChangeRequest, now: datetime) -> MemberRegistry:
    """The registry with the broker's requested address and folder."""
    if request.port:
        registry = replace(registry, port=request.port)
    if request.broker_folder:
        registry = replace(registry, broker_folder=request.broker_folder)
    if request.hosts and list(request.hosts) != registry.hosts:
        registry = _renew(replace(registry, hosts=list(request.hosts)), BROKER, request.days, now)
    return registry


def _with(registry: MemberRegistry, name: str, member: RegisteredMember) -> MemberRegistry:
    members = {**registry.members, name: member}
    record = _record(name, member.pair, member.key_fingerprints)
    return replace(registry, members=members, issued=[*registry.issued, record])


def _record(member: str, pair: KeyPair, keys: tuple[str, ...]) -> IssuedCertificate:
    return IssuedCertificate(member=member, serial=pair.serial, expires=pair.expires, keys=keys)


def _unknown(registry: MemberRegistry, name: str) -> UsageError:
    return UsageError(
        f"federation {registry.federation!r} has no member {name!r}", suggest(name, registry.pairs)
    )


def _sign(registry: MemberRegistry, now: datetime) -> MemberRegistry:
    """The registry with a new member list and a new revocation list."""
    version = registry.version + 1
    members = {
        name: member_list.Member(member.signing_key, member.pair.expires)
        for name, member in registry.members.items()
        if name != MONITOR
    }
    listed = MemberList(
        federation=registry.federation,
        version=version,
        issued=now,
        expires=min(max(each.expires for each in members.values()) + _GRACE, registry.ca.expires),
        coordinator=members.pop(COORDINATOR),
        nodes=members,
    )
    charter = member_list.sign(listed, registry.key)
    signed = replace(registry, version=version, charter=charter, charter_expires=listed.expires)
    return replace(signed, crl=_list_revoked(signed, now))


def _list_revoked(registry: MemberRegistry, now: datetime) -> str:
    revoked = {each.serial: each.revoked for each in registry.issued if each.revoked}
    return certificate_authority.revocation_list(registry.ca, revoked, now, registry.version)


class RegistryChanges(NamedTuple):
    """What distinguishes two registries: names of members, or `broker`.

    A member with new keys is revoked and added.
    """

    added: list[str]
    renewed: list[str]
    revoked: list[str]
    moved: bool  # the broker has another address: all kits name it
    relocated: bool  # the broker's files lie elsewhere

    @property
    def rekeyed(self) -> list[str]:
        """Members whose old keys are revoked and who have new ones."""
        return [name for name in self.added if name in self.revoked]

    @property
    def nodes(self) -> list[str]:
        """Nodes that were added, removed or have new keys: the coordinator must learn of each."""
        return [
            name
            for name in dict.fromkeys([*self.added, *self.revoked])
            if name not in (COORDINATOR, MONITOR)
        ]


def compare_registries(old: MemberRegistry | None, new: MemberRegistry) -> RegistryChanges:
    """The changes from `old` to `new`; without an old one, all members are added."""
    if old is None:
        return RegistryChanges(list(new.members), [], [], False, False)
    keys = {name: member.keys for name, member in old.members.items()}
    added = [name for name, member in new.members.items() if keys.get(name) != member.keys]
    before = {each.serial for each in old.issued if each.revoked}
    revoked = [each.member for each in new.issued if each.revoked and each.serial not in before]
    renewed = [
        name
        for name, pair in new.pairs.items()
        if name not in added and pair.serial != old.pairs[name].serial
    ]
    return RegistryChanges(
        added,
        renewed,
        list(dict.fromkeys(revoked)),
        moved=old.url != new.url,
        relocated=old.broker_folder != new.broker_folder,
    )
