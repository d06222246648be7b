"""A federation's folder: the authority's register, and all that is written from it for its broker, members and lines.

The register is the one truth and is replaced in one step. Everything else follows from it and is compared with it at
each run: a run that was killed anywhere is made good by the next one.
"""

import hashlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from string import Template
from typing import NamedTuple

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import check_federation
from broker_config.security import access_list, kit, trust
from broker_config.security import member_registry as register
from broker_config.security.member_registry import Register, Wish
from broker_config.security.registry_changes import Changes, compare
from broker_config.storage import disk

_TEMPLATES = Path(__file__).parent.parent / "broker" / "mosquitto"
_SECRET, _PUBLIC = 0o600, 0o644


class Provisioned(NamedTuple):
    """The register before and now, and the files that were written or removed: all kits, once anything has changed."""

    before: Register | None  # None: the federation is new
    register: Register
    changed: list[Path]

    @property
    def changes(self) -> Changes:
        """Of the members and the broker."""
        return compare(self.before, self.register)

    @property
    def restored(self) -> list[Path]:
        """The files that had been lost or damaged, if nothing but them has changed."""
        return self.changed if self.before == self.register else []


def provision(folder: Path, federation: str, wish: Wish, now: datetime) -> Provisioned:
    """Bring `folder` to what the wish asks for.

    Raises:
        UsageError: the wish cannot be fulfilled, or the folder holds something else.
        EdgeNodeError: the disk does not take it.
    """
    check_federation(federation)
    path = folder / "authority" / "register.json"
    if not path.exists():
        _check_empty(folder)
    with disk.writing(folder):
        for each in (folder, *(folder / name for name in ("authority", "broker", "broker/data", "kits", "trust"))):
            each.mkdir(mode=0o700, parents=each == folder, exist_ok=True)
    with disk.claimed(folder / "authority"):
        old = _read(path, federation) if path.exists() else None
        new = register.change(old, wish, now) if old else register.found(federation, wish, now)
        with disk.writing(folder):
            if new != old:
                disk.replace_bytes(path, _encode(new), mode=_SECRET)
            return Provisioned(old, new, list(_publish(folder, new, fresh=new != old)))


def _check_empty(folder: Path) -> None:
    """A folder that is new, or that a first run has left when it was killed."""
    if folder.is_dir():
        strangers = [each for each in folder.rglob("*") if each.is_file() and each.parent.name != "authority"]
        if strangers:
            raise UsageError(
                f"{folder} holds files, but no federation's register",
                "choose another folder (--out), or bring back its authority/register.json",
            )


class _File(Struct, frozen=True):
    """A register on disk: a bit of it that flips must not find its way into kits."""

    sha256: str
    register: msgspec.Raw


def _encode(register: Register) -> bytes:
    content = msgspec.json.encode(register)
    return msgspec.json.encode(_File(hashlib.sha256(content).hexdigest(), msgspec.Raw(content)))


def _read(path: Path, federation: str) -> Register:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        if hashlib.sha256(file.register).hexdigest() != file.sha256:
            raise ValueError("its checksum does not fit")
        found = msgspec.json.decode(file.register, type=Register)
    except OSError as error:
        raise UsageError(f"the register {path} cannot be read: {error.strerror}", "make it readable") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"the register {path} is damaged: {error}", "bring it back from a backup") from None
    if found.federation != federation:
        raise UsageError(
            f"{path.parent.parent} belongs to federation {found.federation!r}",
            "give its name, or choose another folder (--out)",
        )
    return found


def _publish(folder: Path, register: Register, *, fresh: bool) -> Iterator[Path]:
    """Write what is missing or differs; of a fresh register every kit does, and none need be opened to see that.

    No kit before its passphrase: without one it would be of no use.
    """
    phrases = "".join(f"{name} {holder.passphrase}\n" for name, holder in sorted(register.members.items()))
    yield from _write(folder / "passphrases.txt", phrases, _SECRET)
    for member in kits(register):
        path, passphrase = folder / "kits" / f"{member.name}.kit", register.members[member.name].passphrase
        if fresh or not _holds(path, member, passphrase):
            kit.write(path, member, passphrase)
            yield path
    for name in register.nodes:
        believed = trust.Trust(
            federation=register.federation, node=name, authority=register.key.public, charter=register.charter
        )
        yield from _write(folder / "trust" / f"{name}.trust", trust.encode(believed).decode(), _PUBLIC)
    for name, text in _broker_files(register, folder / "broker").items():
        yield from _write(folder / "broker" / name, text, _SECRET if name == "broker.key" else _PUBLIC)
    for gone in {each.member for each in register.issued} - register.members.keys():
        for path in (folder / "kits" / f"{gone}.kit", folder / "trust" / f"{gone}.trust"):
            if path.exists():
                path.unlink()
                yield path


def kits(register: Register) -> Iterator[kit.Kit]:
    """Every member's kit, as it is now."""
    for name, holder in register.members.items():
        yield kit.Kit(
            federation=register.federation,
            name=name,
            broker=register.url,
            authority=register.key.public,
            charter=register.charter,
            ca=register.ca.certificate,
            certificate=holder.pair.certificate,
            key=holder.pair.key,
            signing=holder.signing,
        )


def _broker_files(register: Register, here: Path) -> dict[str, str]:
    """What the broker needs: name -> content."""
    nodes = len(register.members)
    conf = Template((_TEMPLATES / "provisioned.conf").read_text()).substitute(
        federation=register.federation,
        folder=register.broker_folder or here.resolve(),
        port=register.port,
        queued_messages=max(10_000, 100 * nodes),
        connections=max(1000, 4 * nodes),
    )
    return {
        "mosquitto.conf": conf,
        "acl": access_list.acl(register.federation),
        "ca.pem": register.ca.certificate,
        "broker.key": register.broker.key,
        "broker.pem": register.broker.certificate,
        "crl.pem": register.crl,
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
