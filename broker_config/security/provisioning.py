"""A federation's folder: the authority's registry,
and all files written from it for broker, members and lines.

The registry is the one truth and is replaced in one step. Everything else follows from it and is
compared with it in each run, so the next run repairs whatever a killed one left undone.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from string import Template
from typing import NamedTuple

import msgspec
from msgspec import Struct, structs

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import check_federation
from broker_config.security import access_list, answer, kit, member_list, trust
from broker_config.security.member_registry import (
    ChangeRequest,
    MemberRegistry,
    RegistryChanges,
    apply_request,
    compare_registries,
    create_registry,
)
from broker_config.storage import disk

_TEMPLATES = Path(__file__).parent.parent / "broker" / "mosquitto"
_SECRET = 0o600
_PUBLIC = 0o644
_FOLDERS = ("authority", "broker", "broker/data", "kits", "answers", "trust")


class ProvisioningResult(NamedTuple):
    """The registry before and now, and the files that were written or removed: all kits,
    if anything has changed.
    """

    before: MemberRegistry | None  # None: the federation is new
    registry: MemberRegistry
    changed: list[Path]

    @property
    def changes(self) -> RegistryChanges:
        """Changes of the members and the broker."""
        return compare_registries(self.before, self.registry)

    @property
    def restored(self) -> list[Path]:
        """The files that had been lost or damaged, if nothing but them has changed."""
        return self.changed if self.before == self.registry else []


def provision(
    folder: Path, federation: str, request: ChangeRequest, now: datetime
) -> ProvisioningResult:
    """Apply a request to the federation in `folder`.

    Raises:
        UsageError: the request cannot be met, or the folder holds something else.
        EdgeNodeError: the disk does not take it.
    """
    check_federation(federation)
    path = folder / "authority" / "register.json"
    with _open_folder(folder):
        old = _read(path, federation) if path.exists() else None
        if old:
            _check_newest(folder, old)
        new = apply_request(old, request, now) if old else create_registry(federation, request, now)
        with disk.writing(folder):
            if new != old:
                disk.replace_bytes(path, _encode(new), mode=_SECRET)
            changed = list(_publish(folder, new, fresh=new != old))
        return ProvisioningResult(old, new, changed)


@contextmanager
def _open_folder(folder: Path) -> Iterator[None]:
    """Make a federation's folder, and keep others from changing it."""
    if not (folder / "authority" / "register.json").exists():
        _check_empty(folder)
    with disk.writing(folder):
        for each in (folder, *(folder / name for name in _FOLDERS)):
            each.mkdir(mode=0o700, parents=each == folder, exist_ok=True)
    with disk.lock_folder(folder / "authority"):
        yield


def _check_empty(folder: Path) -> None:
    """Raise UsageError unless the folder is new, or was left by a first run that was killed."""
    if folder.is_dir():
        strangers = [
            each for each in folder.rglob("*") if each.is_file() and each.parent.name != "authority"
        ]
        if strangers:
            raise UsageError(
                f"{folder} holds files, but no federation's registry",
                "choose another folder (--out), or bring back its authority/register.json",
            )


def _check_newest(folder: Path, registry: MemberRegistry) -> None:
    """Raise UsageError if files were written from a newer registry:
    going on would undo what has been changed since.
    """
    newest = max(
        (_version(path, registry) for path in (folder / "trust").glob("*.trust")), default=0
    )
    if newest > registry.version:
        raise UsageError(
            f"the registry in {folder / 'authority'} is an older copy: it is of version "
            f"{registry.version}, and files of version {newest} have been written from a newer "
            "one",
            "bring the newer one back: with this one, members that were revoked since would be "
            "members again",
        )


def _version(path: Path, registry: MemberRegistry) -> int:
    """The version of the member list in a trust file; 0 if that is damaged: it is written again."""
    try:
        return member_list.verify_signature(
            trust.read(path).charter, registry.authority, str(path)
        ).version
    except UsageError:
        return 0


class _File(Struct, frozen=True):
    """A registry on disk, with a checksum: a flipped bit must not find its way into kits."""

    sha256: str
    register: msgspec.Raw


class _RetiredFields(Struct, frozen=True):
    """Fields of registries with several administrators, which this version does not know."""

    grants: int = 0


def _encode(registry: MemberRegistry) -> bytes:
    content = msgspec.json.encode(registry)
    return msgspec.json.encode(_File(hashlib.sha256(content).hexdigest(), msgspec.Raw(content)))


def _read(path: Path, federation: str) -> MemberRegistry:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        if hashlib.sha256(file.register).hexdigest() != file.sha256:
            raise ValueError("its checksum does not fit")
        found = msgspec.json.decode(file.register, type=MemberRegistry)
        retired = msgspec.json.decode(file.register, type=_RetiredFields)
    except OSError as error:
        raise UsageError(
            f"the registry {path} cannot be read: {error.strerror}", "make it readable"
        ) from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"the registry {path} is damaged: {error}", "bring it back from a backup"
        ) from None
    if retired.grants:
        raise UsageError(
            f"the registry {path} has `grants`: this version of edge-node knows one "
            "administrator only",
            "go on with the version that wrote it, or provision the federation anew in another "
            "folder (--out)",
        )
    if found.federation != federation:
        raise UsageError(
            f"{path.parent.parent} belongs to federation {found.federation!r}",
            "give its name, or choose another folder (--out)",
        )
    return found


def _publish(folder: Path, registry: MemberRegistry, *, fresh: bool) -> Iterator[Path]:
    """Write what is missing or differs.

    With a `fresh` registry every kit does, so none has to be opened to see that.

    Passphrases come first: a kit without one would be of no use.
    """
    made = {each.name: each for each in kits(registry)}
    phrases = "".join(f"{name} {registry.members[name].passphrase}\n" for name in sorted(made))
    yield from _write(folder / "passphrases.txt", phrases, _SECRET)
    for member in made.values():
        path = folder / "kits" / f"{member.name}.kit"
        passphrase = registry.members[member.name].passphrase
        if fresh or not _holds(path, member, passphrase):
            kit.write(path, member, passphrase)
            yield path
    for name in sorted(registry.members.keys() - made.keys()):
        text = answer.encode(_answer(registry, name), registry.key).decode()
        yield from _write(folder / "answers" / f"{name}.answer", text, _PUBLIC)
    for name in registry.nodes:
        trusted = trust.Trust(
            federation=registry.federation,
            node=name,
            authority=registry.authority,
            charter=registry.charter,
        )
        yield from _write(
            folder / "trust" / f"{name}.trust", trust.encode(trusted).decode(), _PUBLIC
        )
    for name, text in _broker_files(registry, folder / "broker").items():
        secret = _SECRET if name.endswith(".key") else _PUBLIC
        yield from _write(folder / "broker" / name, text, secret)
    for name in {each.member for each in registry.issued}:
        stale = {
            folder / "kits" / f"{name}.kit": name not in made,
            folder / "answers" / f"{name}.answer": name in made or name not in registry.members,
            folder / "trust" / f"{name}.trust": name not in registry.members,
        }
        for path, is_stale in stale.items():
            if is_stale and path.exists():
                path.unlink()
                yield path


def kits(registry: MemberRegistry) -> Iterator[kit.Kit]:
    """The kit, as it is now, of every member whose keys were made here."""
    for name, member in registry.members.items():
        if not member.has_own_keys:
            told = structs.asdict(_answer(registry, name))
            yield kit.Kit(**told, key=member.pair.key, signing=member.signing)


def _answer(registry: MemberRegistry, name: str) -> answer.Answer:
    return answer.Answer(
        federation=registry.federation,
        name=name,
        broker=registry.url,
        authority=registry.authority,
        charter=registry.charter,
        ca=registry.ca.certificate,
        certificate=registry.members[name].pair.certificate,
    )


def _broker_files(registry: MemberRegistry, here: Path) -> dict[str, str]:
    """The files that the broker needs: name -> content."""
    nodes = len(registry.members)
    folder = registry.broker_folder or here.resolve()
    conf = Template((_TEMPLATES / "provisioned.conf").read_text()).substitute(
        federation=registry.federation,
        folder=folder,
        port=registry.port,
        queued_messages=max(10_000, 100 * nodes),
        connections=max(1000, 4 * nodes),
    )
    return {
        "mosquitto.conf": conf,
        "acl": access_list.acl(registry.federation, registry.revoked),
        "ca.pem": registry.ca.certificate,
        "broker.key": registry.broker.key,
        "broker.pem": registry.broker.certificate,
        "crl.pem": registry.crl,
    }


def _write(path: Path, text: str, mode: int) -> Iterator[Path]:
    if not path.is_file() or path.read_text(errors="replace") != text:
        disk.replace_bytes(path, text.encode(), mode=mode)
        yield path


def _holds(path: Path, member: kit.Kit, passphrase: str) -> bool:
    try:
        return kit.read(path, passphrase) == member
    except UsageError:  # it is missing, damaged, or has another passphrase
        return False
