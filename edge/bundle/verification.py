"""Verification of bundles: a line serves only what its own node made from broadcasts of its own
coordinator.

A trust file pins the authority. The newest charter that it has signed, of those in the trust file,
in the bundle and in the memory of accepted bundles, says which keys are valid. A bundle's manifest
is one signed list of hashes, so there is one role where TUF has four. The attacks that TUF
(specification 1.5.2) and Uptane list, and the function that stops each:

- arbitrary software, tampering: `_check_signature`, the hashes in `bundle.check_bundle`, and those
  of the bytes that are used in `bundle.copied_to_memory`. Nothing is parsed before its signature is
  known to be right, but for two names in the text of a refusal (`_stated_owner`).
- wrong software, wrong recipient (another node's or federation's bundle): `_check_recipient`.
- mix-and-match: every file but the charter is in the signed list; a charter is signed by itself,
  and never older than the newest that is known (`_newest_charter`).
- rollback: `_check_age`, against the memory, but for one bundle that is admitted on purpose. The
  same for the charter (`_newest_charter`).
- freeze: `_check_expiry` for the bundle, `member_list.check_expiry`; as good as this machine's
  clock.
- fast-forward (a stolen key signs an enormous version, so that all later ones look old): versions
  are compared under one key only, and start anew with the key that a charter puts in its place
  (`_check_age`).
- endless data, slow retrieval: `bundle.read_small_file` and `bundle.copied_to_memory` read plain
  files of bounded size.
- key compromise: a charter without the stolen key (`_newest_charter`, `_check_signature`), in the
  next bundle or trust file.
- a node that made its bundle from broadcasts other than its coordinator's: `verify_broadcast`. It
  proves which broadcast the node had, not what the node did with it.
- extraneous dependencies, malicious mirrors, partial installation: a bundle is one self-contained
  folder, complete or refused.

Not stopped: whoever holds a bundle can read it, and whoever keeps new bundles from a line keeps it
on its last one, which the line warns of from 30 days before that expires.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from broker_config.protocol import messages
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Digest, Name
from broker_config.security import member_list, message_signing
from broker_config.security.member_list import MemberList
from broker_config.security.signing import ForgedError, PublicKey, verify
from broker_config.security.trust import Trust
from broker_config.storage import checksums, disk
from edge.bundle import bundle_format as bundle
from edge.bundle.bundle_format import Bundle, BundleError, Manifest
from edge.bundle.expiry import ExpiryDates

_ANOTHER = "get the bundle again from where it was exported"
_LONG_AGO = datetime.fromtimestamp(0, UTC)


class AdmittedBundle(NamedTuple):
    """A bundle that may be served, and when that expires."""

    bundle: Bundle
    expiry_dates: ExpiryDates


class Origin(Protocol):
    """The origin of a model: a bundle's manifest, or the metadata of a personal model."""

    @property
    def federation(self) -> str: ...  # noqa: D102
    @property
    def run(self) -> str: ...  # noqa: D102
    @property
    def round(self) -> int: ...  # noqa: D102
    @property
    def broadcast(self) -> messages.Manifest | None: ...  # noqa: D102


class SignedManifest(Protocol):
    """The fields that every signed manifest has."""

    @property
    def node(self) -> str: ...  # noqa: D102
    @property
    def federation(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> int: ...  # noqa: D102
    @property
    def expires(self) -> datetime | None: ...  # noqa: D102


_M = TypeVar("_M", bound=SignedManifest)


class _Accepted(Struct, frozen=True, kw_only=True):
    """Memory of the newest bundle that was served: one file for each node of each federation."""

    authority: PublicKey
    charter: bytes  # the newest, signed
    key: PublicKey  # of the node
    version: int
    manifest: Digest  # of its bytes
    # likewise, of the one older bundle that was put back into service on purpose
    older: Digest | None = None


class Verifier(NamedTuple):
    """Checks of signature, origin and age that a bundle must pass before a line serves it."""

    trust: Trust
    memory: Path  # folder with the memory of accepted bundles; only the line writes there
    accept_older: bool = False  # than the newest accepted one
    remembers: bool = True  # writes what it accepts to the memory; else the memory is only read

    @contextmanager
    def admit(self, folder: Path) -> Iterator[AdmittedBundle]:
        """Verify a bundle; it is written to the memory when the block ends without an error.

        Raises:
            BundleError: it must not be served.
            MemberListError: there is no valid charter.
            EdgeNodeError: the memory cannot be used.
        """
        with self.admit_manifest(folder, bundle.parse_manifest) as found:
            yield AdmittedBundle(
                bundle.check_bundle(folder, found.manifest, found.content), found.expiry_dates
            )

    @contextmanager
    def admit_manifest(
        self, folder: Path, parse: Callable[[Path, bytes], _M]
    ) -> "Iterator[VerifiedManifest[_M]]":
        """As `admit`, for any kind of bundle whose manifest `parse` reads;
        its other files are not yet checked.
        """
        locked = _locked(self.memory) if self.remembers else nullcontext()
        with locked:
            before = _load_memory(self._file, self.trust)
            found = self._verify(folder, before, parse)
            yield found
            if self.remembers and found.accepted != before:
                with disk.writing(self.memory):
                    checksums.write_record(self._file, found.accepted)

    @property
    def newest(self) -> str:
        """Digest of the newest bundle that was accepted; empty if none was.

        UsageError if the memory is damaged.
        """
        before = _load_memory(self._file, self.trust)
        return before.manifest if before else ""

    def check_manifest(self, folder: Path) -> Manifest:
        """The manifest of a bundle of which only manifest,
        signature and charter are there; raises as `admit` does.
        """
        return self._verify(
            folder, _load_memory(self._file, self.trust), bundle.parse_manifest
        ).manifest

    @property
    def _file(self) -> Path:
        return self.memory / f"{self.trust.node}@{self.trust.federation}.json"  # no name holds an @

    def _verify(
        self, folder: Path, before: _Accepted | None, parse: Callable[[Path, bytes], _M]
    ) -> "VerifiedManifest[_M]":
        """Check all that can be checked without the bundle's other files."""
        trust = self.trust
        content = bundle.load_manifest(folder)
        signed, charter = _newest_charter(folder, trust, before, self._file)
        key = _check_signature(folder, content, charter, trust)
        manifest = parse(folder, content)
        _check_recipient(folder, manifest, trust)
        if isinstance(manifest, Manifest):  # another role's model is made from no broadcast
            _check_origin(folder, manifest, charter)
        end = _check_expiry(folder, manifest)
        found = _Accepted(
            authority=trust.authority,
            charter=signed,
            key=key,
            version=manifest.version,
            manifest=hashlib.sha256(content).hexdigest(),
        )
        accepted = _check_age(folder, found, before, self.accept_older)
        return VerifiedManifest(
            content, manifest, {"bundle": end, "charter": charter.expires}, accepted
        )


class VerifiedManifest(NamedTuple, Generic[_M]):
    """A manifest whose signature is right."""

    content: bytes  # of the manifest
    manifest: _M
    expiry_dates: ExpiryDates
    accepted: _Accepted  # for the memory, once the bundle is served


def verify_broadcast(model: Origin, charter: MemberList) -> messages.Manifest:
    """The broadcast of a model if the coordinator has made it, in that run and round;
    else ForgedError.

    It may be of a later round: a method that serves the last average gives it to nodes that skipped
    the last round.
    """
    broadcast = model.broadcast
    if broadcast is None:
        raise ForgedError("its coordinator has signed none")
    if (broadcast.federation, broadcast.run) != (model.federation, model.run):
        raise ForgedError("that is of another run")
    if broadcast.round < model.round:
        raise ForgedError(f"that is of round {broadcast.round}, the model of round {model.round}")
    message_signing.verify_broadcast(broadcast, charter.coordinator.key)
    return broadcast


def _newest_charter(
    folder: Path, trust: Trust, before: _Accepted | None, memory: Path
) -> tuple[bytes, MemberList]:
    """The newest charter that the authority has signed, with and without its signature."""
    sources = {
        "the trust file": trust.charter,
        f"{folder / bundle.CHARTER}": _load(folder, bundle.CHARTER),
    }
    if before:
        sources[f"{memory}"] = before.charter
    found = [
        (member_list.verify_signature(data, trust.authority, source), source, data)
        for source, data in sources.items()
    ]
    for charter, source, _ in found:
        if charter.federation != trust.federation:
            raise member_list.MemberListError(
                f"the charter in {source} is of federation {charter.federation!r}, not "
                f"{trust.federation!r}",
                _ANOTHER,
            )
    charter, source, data = max(found, key=lambda each: each[0].version)
    member_list.check_expiry(charter, source)
    return data, charter


def _check_signature(folder: Path, content: bytes, charter: MemberList, trust: Trust) -> PublicKey:
    """The key of the node that has signed the manifest."""
    key = charter.key(trust.node)
    if key is None:
        raise BundleError(
            f"{trust.node} is no member of federation {trust.federation!r} any more, so its "
            "bundles are not served",
            "ask whoever provisions the federation",
        )
    try:
        verify(key, bundle.CONTEXT, content, _load(folder, bundle.SIGNATURE))
    except ForgedError:
        path = folder / bundle.MANIFEST
        own = _Owner(trust.node, trust.federation)
        stated = _stated_owner(content)
        if stated and stated != own:
            raise BundleError(
                f"{path} says that this bundle is of {stated}, the trust file is for {own}",
                f"serve a bundle of {trust.node}, or pass the trust file of {stated.node}",
            ) from None
        raise BundleError(
            f"{path} is not signed by {trust.node}: {bundle.SIGNATURE} does not fit", _ANOTHER
        ) from None
    return key


class _Owner(Struct, frozen=True):
    """The node and federation of a bundle."""

    node: Name
    federation: Name

    def __str__(self) -> str:
        return f"{self.node} in federation {self.federation!r}"


def _stated_owner(content: bytes) -> _Owner | None:
    """The owner that an unverified manifest states: for the text of an error and nothing else."""
    try:
        return msgspec.json.decode(content, type=_Owner)
    except (ValueError, RecursionError):  # also of bytes that are no text, and of endless nesting
        return None


def _load(folder: Path, name: str) -> bytes:
    if not (folder / name).exists():
        raise BundleError(
            f"{folder} is not signed: {name} is missing",
            "export it with the node's kit (edge-node export --kit)",
        )
    return bundle.read_small_file(folder, name)


def _check_recipient(folder: Path, manifest: SignedManifest, trust: Trust) -> None:
    if (manifest.node, manifest.federation) != (trust.node, trust.federation):
        raise BundleError(
            f"{folder} is of {manifest.node} in federation {manifest.federation!r}, "
            f"this line serves {trust.node} in {trust.federation!r}",
            "serve a bundle of that node, or pass the trust file of the other one",
        )


def _check_origin(folder: Path, manifest: Manifest, charter: MemberList) -> None:
    try:
        verify_broadcast(manifest, charter)
    except ForgedError as error:
        raise BundleError(
            f"{folder} was not made from a broadcast of this federation's coordinator: {error}",
            "export a model that was trained with the current coordinator",
        ) from None


def _check_expiry(folder: Path, manifest: SignedManifest) -> datetime:
    """The expiry date, which is not past."""
    end = manifest.expires or _LONG_AGO
    if end < datetime.now(UTC):
        raise BundleError(
            f"{folder} has expired on {end:%Y-%m-%d}", "let its model be exported again with a kit"
        )
    return end


def _check_age(
    folder: Path, found: _Accepted, before: _Accepted | None, accept_older: bool
) -> _Accepted:
    """The new memory, if the bundle is not older than the accepted one,
    nor a different one of the same version.

    An older bundle that is put back on purpose passes from then on, alone, until a newer one is
    accepted.
    """
    if before is None or before.key != found.key or found.version > before.version:
        return found
    if found.version == before.version:
        if found.manifest != before.manifest:
            raise BundleError(
                f"{folder} is another bundle than this line has served, of the same version, "
                f"{_made_at(found.version)}",
                "find out which one is right, and export it again",
            )
        return found
    if found.manifest != before.older and not accept_older:
        age = _made_at(found.version)
        newest = _made_at(before.version)
        raise BundleError(
            f"{folder} is older ({age}) than what this line has served ({newest})",
            "serve the newer one; or go back to this one on purpose, with --accept-older",
        )
    return msgspec.structs.replace(before, charter=found.charter, older=found.manifest)


def _made_at(version: int) -> str:
    """A version as text: it is the time of export in seconds since 1970, or more."""
    try:
        return f"of {datetime.fromtimestamp(version, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"of version {version}"  # beyond the year 9999


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the memory, creating its folder if need be; others wait meanwhile:
    loading a model takes a second.
    """
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _load_memory(path: Path, trust: Trust) -> _Accepted | None:
    """What was accepted before under this authority, if anything was."""
    try:
        found = checksums.read_record(path, _Accepted)
    except (OSError, checksums.DamagedError) as error:
        raise UsageError(
            f"what this line has served before cannot be read from {path}: {error}",
            f"restore it from a copy, or remove {path}: an older bundle would then be accepted "
            "once",
        ) from None
    return found if found and found.authority == trust.authority else None
