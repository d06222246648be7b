"""Enrolment of a member: it makes its own keys, asks for their certificates,
and completes its kit with the answer.

The kit's folder is the member's. No private key leaves it, and none is ever overwritten: new keys
take a new folder.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import MONITOR, check_federation, check_name
from broker_config.security import answer as answers
from broker_config.security import (
    certificate_authority,
    certificate_request,
    kit,
    member_list,
    trust,
)
from broker_config.security.answer import Answer
from broker_config.security.kit import Keys, Kit
from broker_config.security.member_registry import BROKER
from broker_config.security.secret_environment import PASSPHRASE
from broker_config.security.signing import SigningKey, fingerprint
from broker_config.storage import disk

_ELSEWHERE = "wait for that process, or choose another folder (--out)"


class Enrolment(NamedTuple):
    """A member's folder."""

    folder: Path
    federation: str
    name: str

    @property
    def kit(self) -> Path:
        """The kit; only its keys, as long as the request is not answered."""
        return self.folder / f"{self.name}.kit"

    @property
    def passphrase(self) -> Path:
        """The kit's passphrase, until its owner moves it to a safer place.

        Named as processes look for it.
        """
        return self.folder / PASSPHRASE

    @property
    def request(self) -> Path:
        """What is sent to whoever provisions the federation."""
        return self.folder / f"{self.name}.request"

    @property
    def trust(self) -> Path:
        """What the lines of a node get."""
        return self.folder / f"{self.name}.trust"


class Requested(NamedTuple):
    """A request, and whether its keys are new."""

    fingerprint: str
    made: bool


class Accepted(NamedTuple):
    """The kit before and after an answer; None: it was only keys."""

    before: Kit | None
    kit: Kit

    @property
    def authority(self) -> str:
        """The fingerprint of the authority that has answered."""
        return fingerprint(bytes.fromhex(self.kit.authority))


def request(place: Enrolment) -> Requested:
    """Write the request for the keys in the folder, which are made if there are none.

    Raises:
        UsageError: a member cannot have this name, or the folder's kit is another's or cannot be
            opened.
        EdgeNodeError: the disk does not take it.
    """
    check_federation(place.federation)
    if check_name(place.name, "the member's name") == BROKER:
        raise UsageError(
            f"a member cannot be called {BROKER}", "take the name that the operator has told you"
        )
    with disk.lock_folder(place.folder, _ELSEWHERE):
        made = not place.kit.exists()
        if made:
            if not place.passphrase.exists():
                with disk.writing(place.folder):
                    disk.replace_bytes(place.passphrase, kit.new_passphrase().encode(), mode=0o600)
            keys = Keys(
                federation=place.federation,
                name=place.name,
                key=certificate_authority.new_private(),
                signing=SigningKey.generate().raw,
            )
            kit.write(place.kit, keys, _passphrase(place))
        found = _open(place)
        if not found.signing:
            raise UsageError(
                f"{place.kit} was made by whoever provisions {found.federation}: a request needs "
                "keys of its own",
                "make new ones in another folder (--out)",
            )
        with disk.writing(place.folder):
            disk.replace_bytes(
                place.request, certificate_request.encode(found).encode(), mode=0o644
            )
    public = certificate_authority.public_of(found.key)
    return Requested(
        certificate_request.request_fingerprint(public, SigningKey(found.signing).public), made
    )


def accept(place: Enrolment, path: Path) -> Accepted:
    """Complete the kit with an answer, or renew it.

    Raises:
        UsageError: the answer is damaged, out of date, or another's.
        EdgeNodeError: the disk does not take it.
    """
    answer = answers.read(path)
    if (answer.name, answer.federation) != (place.name, place.federation):
        raise UsageError(
            f"{path} is the answer for {answer.name} in federation {answer.federation!r}, "
            f"not for {place.name} in {place.federation!r}",
            f"ask whoever provisions {place.federation} for answers/{place.name}.answer",
        )
    if not place.kit.exists():
        raise UsageError(
            f"{place.folder} has no keys of {place.name}",
            f"name the folder of the request (--out); if it is lost, make new keys: "
            f"edge-node request {place.federation} {place.name}",
        )
    with disk.lock_folder(place.folder, _ELSEWHERE):
        before = _open(place)
        _check_keys(answer, before, path, place.kit)
        if isinstance(before, Kit):
            _check_newer(answer, before, path, place.kit)
        new = Kit(**structs.asdict(answer), key=before.key, signing=before.signing)
        members = new.members()
        kit.write(place.kit, new, _passphrase(place))
        if place.name in members.nodes:
            trusted = trust.Trust(
                federation=new.federation,
                node=new.name,
                authority=new.authority,
                charter=new.charter,
            )
            with disk.writing(place.folder):
                disk.replace_bytes(place.trust, trust.encode(trusted), mode=0o644)
    kit_before = before if isinstance(before, Kit) else None
    return Accepted(kit_before, new)


def _passphrase(place: Enrolment) -> str:
    return (
        place.passphrase.read_text() if place.passphrase.exists() else kit.ask_passphrase(place.kit)
    )


def _open(place: Enrolment) -> Keys | Kit:
    found = kit.read_keys(place.kit, _passphrase(place))
    if (found.name, found.federation) != (place.name, place.federation):
        raise UsageError(
            f"{place.kit} is of {found.name} in federation {found.federation!r}",
            "choose another folder (--out)",
        )
    return found


def _check_keys(answer: Answer, keys: Keys | Kit, path: Path, mine: Path) -> None:
    """Raise UsageError unless the answer is for these keys, and still valid."""
    members = member_list.verify(answer.charter, answer.authority, str(path))
    certificate = certificate_authority.KeyPair(answer.certificate)
    signs = answer.name == MONITOR or members.key(answer.name) == SigningKey(keys.signing).public
    if not signs or certificate.public != certificate_authority.public_of(keys.key):
        raise UsageError(
            f"{path} does not belong to the keys in {mine}: it answers another request",
            "take the answer to this folder's request; if there is no other, the request was "
            "replaced on its way: tell whoever provisions the federation, who must revoke it",
        )
    if certificate.expires < datetime.now(UTC):
        raise UsageError(
            f"the certificate in {path} has expired on {certificate.expires:%Y-%m-%d}",
            f"ask for a newer one: edge-node provision {answer.federation} --renew {answer.name}",
        )


def _check_newer(answer: Answer, before: Kit, path: Path, mine: Path) -> None:
    """Raise UsageError if the answer is another authority's than the kit, or older than it."""
    if answer.authority != before.authority:
        raise UsageError(
            f"{path} is of another authority than {mine}",
            "was the federation founded anew? Then make a request in another folder (--out), and "
            "compare fingerprints",
        )
    then, now = (
        member_list.verify_signature(each.charter, before.authority, source)
        for each, source in ((before, str(mine)), (answer, str(path)))
    )
    if now.version < then.version:
        raise UsageError(
            f"{path} is older than {mine}: of version {now.version}, and that is of version "
            f"{then.version}",
            "take the newest answer",
        )
