"""A federation's second administrator: how he becomes one, and how administrators exchange the register.

Each has a folder with keys of his own, and all else in common: each run that changes something writes the register
without any private key, signed, for the others to take over before they change something themselves.
"""

from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Name
from broker_config.protocol.topics import check_name
from broker_config.security import certificate_authority, delegation
from broker_config.security.certificate_authority import KeyPair
from broker_config.security.delegation import Grant
from broker_config.security.member_registry import Administrator, MemberRegistry, RegisteredMember
from broker_config.security.received_file import read_json
from broker_config.security.signing import ForgedError, PublicKey, SigningKey, fingerprint, open_envelope
from broker_config.storage import checksums

_CONTEXT, _REQUEST = "register", "administrator"
_AGAIN = "have it sent again by the other administrator"


class AdministratorKeys(Struct, frozen=True, kw_only=True):
    """What an administrator has before the first one has admitted him. Its repr shows no secret."""

    federation: Name
    name: Name
    ca: KeyPair
    charter_key: bytes

    def __repr__(self) -> str:
        return f"AdministratorKeys({self.federation}, {self.name})"

    @property
    def public(self) -> Administrator:
        """What the others know of him."""
        return Administrator(key=SigningKey(self.charter_key).public, ca=self.ca.certificate, name=self.name)


class _Signed(Struct, frozen=True, kw_only=True):
    """A file that an administrator has signed; `key` is believed once its fingerprint was compared."""

    key: PublicKey  # of a request: his own; of a register: the authority's
    signed: bytes


def administrator_fingerprint(administrator: Administrator) -> str:
    """What is compared by voice before somebody is admitted."""
    return fingerprint(f"{administrator.key}{administrator.ca}".encode())


def load_keys(path: Path, federation: str, name: str, now: datetime) -> AdministratorKeys:
    """The keys in a file, which are made if there are none. UsageError if they are another's, or damaged."""
    check_name(name, "the administrator's name")
    if found := read_keys(path):
        if (found.federation, found.name) != (federation, name):
            raise UsageError(
                f"{path.parent.parent} is the folder of {found.name}, an administrator of {found.federation!r}",
                "choose another folder (--out)",
            )
        return found
    made = AdministratorKeys(
        federation=federation,
        name=name,
        ca=certificate_authority.create_authority(federation, now, name),
        charter_key=SigningKey.generate().raw,
    )
    checksums.write_record(path, made)
    return made


def read_keys(path: Path) -> AdministratorKeys | None:
    """The keys in a file; None if there is none."""
    try:
        return checksums.read_record(path, AdministratorKeys)
    except (OSError, checksums.DamagedError) as error:
        raise UsageError(
            f"an administrator's keys cannot be read from {path}: {error}", "bring the file back from a backup"
        ) from None


def encode_request(keys: AdministratorKeys) -> bytes:
    """The file that asks to be admitted: signed with the one key, and the certificate in it with the other."""
    signed = SigningKey(keys.charter_key).sign_envelope(_REQUEST, msgspec.json.encode((keys.federation, keys.public)))
    return msgspec.json.format(msgspec.json.encode(_Signed(key=keys.public.key, signed=signed))) + b"\n"


def read_request(path: Path, federation: str) -> Administrator:
    """Who asks to be admitted to a federation. UsageError if the file is damaged, forged or another federation's."""
    file = read_json(path, _Signed, "administrator's request", _AGAIN)
    try:
        content = open_envelope(file.key, _REQUEST, file.signed)
        asked, administrator = msgspec.json.decode(content, type=tuple[Name, Administrator])
        certificate_authority.check_issued(
            administrator.ca, administrator.ca, asked, f"authority of {administrator.name}"
        )
        if administrator.key != file.key:
            raise ForgedError("its signature is another's")
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"the administrator's request {path} cannot be relied on: {error}", _AGAIN) from None
    if asked != federation:
        raise UsageError(f"{path} asks to be an administrator of {asked!r}, not {federation!r}", _AGAIN)
    return replace(administrator, crl="")


def encode_register(registry: MemberRegistry) -> bytes:
    """The register for other administrators: without private keys, signed."""
    first, *deputies = registry.administrators
    shared = replace(
        registry,
        ca=KeyPair(registry.ca.certificate),
        charter_key=b"",
        broker=KeyPair(registry.broker.certificate),
        members={
            name: RegisteredMember(pair=KeyPair(member.pair.certificate), public=member.signing_key)
            for name, member in registry.members.items()
        },
        crl="",
        first=first,
        deputies=dict(zip(registry.deputies, deputies, strict=True)),
    )
    signed = delegation.sign(registry.key, registry.proof, _CONTEXT, msgspec.json.encode(shared))
    return msgspec.json.format(msgspec.json.encode(_Signed(key=registry.authority, signed=signed))) + b"\n"


def take_over(path: Path, mine: MemberRegistry | AdministratorKeys) -> MemberRegistry:
    """The register in a file with the private keys of `mine`.

    Raises:
        UsageError: it is damaged, of another authority, older than ours, or both have been changed.
    """
    file = read_json(path, _Signed, "register", _AGAIN)
    try:
        content, grant = delegation.open_signed(file.key, _CONTEXT, file.signed)
        shared = msgspec.json.decode(content, type=MemberRegistry)
        _check_grant(shared, delegation.open_grant(shared.grant, file.key), signed_by=grant)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"the register {path} cannot be relied on: {error}", _AGAIN) from None
    if shared.federation != mine.federation:
        raise UsageError(f"the register {path} is of federation {shared.federation!r}, not {mine.federation!r}", _AGAIN)
    if isinstance(mine, MemberRegistry):
        _check_newer(path, shared, mine)
    found = replace(shared, ca=mine.ca, charter_key=mine.charter_key)
    if isinstance(mine, MemberRegistry):
        found = replace(found, **_private(shared, mine))
    return replace(found, first=None) if found.authority == found.key.public else found


def _check_grant(shared: MemberRegistry, newest: Grant, signed_by: Grant | None) -> None:
    """Raise ForgedError unless the administrators in a register are those whom the first one has admitted."""
    cas = {each.key: checksums.digest(each.ca.encode()) for each in shared.deputies.values()}
    first = shared.first and checksums.digest(shared.first.ca.encode())
    said = (shared.federation, shared.grants, first, cas)
    if said != (newest.federation, newest.version, newest.ca, newest.deputies) or signed_by not in (None, newest):
        raise ForgedError("its administrators are not those whom the first one has admitted")


def _check_newer(path: Path, shared: MemberRegistry, mine: MemberRegistry) -> None:
    """Raise UsageError unless all of our changes are in the register that another has sent."""
    assert shared.first
    if shared.first.key != mine.authority:
        raise UsageError(f"the register {path} is of another authority than this folder", _AGAIN)
    common = min(len(shared.history), len(mine.history))
    same = shared.history[:common] == mine.history[:common]
    if shared.grants < mine.grants or (same and len(shared.history) < len(mine.history)):
        raise UsageError(
            f"the register {path} is older than this folder's: of version {shared.version}, not {mine.version}",
            "take the newest one, or none",
        )
    if not same:
        raise UsageError(
            f"the register {path} and this folder's have been changed at the same time",
            "agree whose change is to stay; the other administrator restores the folder as it was before, takes the "
            "register over, and repeats the change",
        )
    if lost := _revoked(mine) - _revoked(shared):
        names = sorted({each.member for each in mine.issued if each.serial in lost})
        raise UsageError(
            f"the register {path} does not know that {', '.join(names)} was revoked",
            "find out from the other administrator why; if in doubt, withdraw that one: --revoke",
        )


def _private(shared: MemberRegistry, mine: MemberRegistry) -> dict[str, object]:
    """What only this folder knows: private keys and passphrases that still fit, and newer revocation lists."""
    members = {}
    for name, member in shared.members.items():
        ours = mine.members.get(name)
        fits = ours is not None and ours.pair.public == member.pair.public and ours.signing_key == member.signing_key
        members[name] = replace(ours, pair=replace(member.pair, key=ours.pair.key)) if ours and fits else member
    fits = mine.broker.public == shared.broker.public
    return {
        "members": members,
        "broker": replace(shared.broker, key=mine.broker.key if fits else ""),
        "crl": mine.crl if _revoked(mine) == _revoked(shared) else "",
        "first": shared.first and _newer(shared.first, mine.first),
        "deputies": {name: _newer(each, mine.deputies.get(name)) for name, each in shared.deputies.items()},
    }


def _newer(theirs: Administrator, ours: Administrator | None) -> Administrator:
    """An administrator with the newer of two revocation lists: nobody is taken off one."""
    known = [each for each in (theirs, ours) if each and each.key == theirs.key and each.crl]
    return max(known, key=lambda each: certificate_authority.count_revoked(each.crl), default=theirs)


def _revoked(registry: MemberRegistry) -> set[str]:
    return {each.serial for each in registry.issued if each.revoked}
