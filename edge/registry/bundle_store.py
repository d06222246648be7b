"""Store of a line's bundles: a folder with the bundles, which of them is served, and their history.

    BUNDLE/       a bundle, named by the first 12 digits of its digest
    state.json    the active bundle and the previous one; who did what, when and why, the newest
    record.jsonl  who did what, when and why, from the beginning (`line_record`)
    requests/     requests of `edge-node bundle` to a running daemon (`control_requests`)

Every change is one atomic rename of data that is already on the disk, so a kill leaves either the
old or the new state.
"""

import fcntl
import os
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import RecordHead
from broker_config.protocol.topics import check_name
from broker_config.storage import checksums, disk
from edge.bundle import bundle_format as bundle
from edge.bundle.bundle_format import BundleError, Manifest
from edge.inference.outcomes import current_time
from edge.registry import line_record
from edge.registry.line_record import Event, What

KEPT = 8  # bundles besides the active and the previous one
_HISTORY = 200  # events
_BAD = 100  # bundles known to have failed, including deleted ones
_TRIED = KEPT + 2  # bundles known to have passed a trial
DIGITS = 12
# in the line's state folder; in the store, locked while the line runs
_FOLDER = "bundles"
_LOCK = "daemon"
_PAUSE = 0.05  # seconds between two attempts to lock


class State(Struct, frozen=True, kw_only=True):
    """What a line serves, and its history."""

    active: str = ""  # a bundle's digits; empty: none yet
    previous: str = ""  # the bundle for a rollback
    named: str = ""  # the bundle that the command to serve named last
    trial: int = 0  # starts of the daemon since `active` is on probation; 0: it is not
    # share of doubted verdicts before `active`, for its probation to compare
    doubts: float | None = None
    bad: dict[str, str] = {}  # bundles that failed in service, and how
    tried: tuple[str, ...] = ()  # whole digests of bundles that a trial has passed, the newest last
    history: tuple[Event, ...] = ()  # the newest last


class StoreInUseError(UsageError):
    """A store that a daemon serves from."""


class BundleStore:
    """A line's bundles. Several processes may use it; changes are made one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def state(self) -> State:
        """The current state; EdgeNodeError when it cannot be read."""
        path = self.folder / "state.json"
        try:
            return checksums.read_record(path, State) or State()
        except (OSError, checksums.DamagedError) as error:
            raise UsageError(
                f"which bundle this line serves cannot be read from {path}: {error}",
                f"restore it from a copy, or remove {path} and name the bundle: edge-node serve "
                "BUNDLE",
            ) from None

    def path(self, digest: str) -> Path:
        """The folder of a bundle, existing or not."""
        return self.folder / digest[:DIGITS]

    def force_command(self, digest: str) -> str:
        """Return how to serve a bundle all the same that was refused."""
        line = shlex.quote(self.folder.name)
        return f"to serve it all the same: edge-node bundle activate {digest} --force --line {line}"

    def digests(self) -> list[str]:
        """The stored bundles, the newest first."""
        found = [path for path in self.folder.glob("[0-9a-f]" * DIGITS) if path.is_dir()]
        return [
            path.name
            for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        ]

    def manifest(self, digest: str) -> Manifest:
        """A bundle's manifest; BundleError when it is damaged."""
        folder = self.path(digest)
        return bundle.parse_manifest(folder, bundle.load_manifest(folder))

    def resolve(self, digits: str) -> str:
        """The one bundle whose digest begins with `digits`; UsageError when there is none,
        or several.
        """
        found = [each for each in self.digests() if digits and each.startswith(digits)]
        if len(found) != 1:
            raise UsageError(
                f"{len(found) or 'no'} bundles in {self.folder} begin with {digits!r}",
                "edge-node bundle list shows what there is; edge-node bundle add BUNDLE adds one",
            )
        return found[0]

    def add(self, folder: Path, by: str, digest: str = "") -> str:
        """Copy a bundle into the store unless it is there; return the first digits of its digest.

        BundleError when it is damaged, or its digest is not `digest`; EdgeNodeError when it cannot
        be written.
        """
        found = bundle.read_bundle(folder).digest[:DIGITS]
        if digest and found != digest:
            raise BundleError(f"{folder} has become another bundle meanwhile", "start again")
        with self._locked() as apply:
            if not self._is_intact(found):
                self._copy(folder, found)
                apply(lambda state: self._with_event(state, "added", found, by))
            self._prune(found)
        return found

    def record_activation(
        self,
        digest: str,
        by: str,
        why: str = "",
        *,
        trial: bool = True,
        doubts: float | None = None,
    ) -> State:
        """Make a bundle the active one.

        The last one that has passed its probation becomes the previous one.

        `doubts` is the share of doubted verdicts so far, if it is known.
        """

        def change(state: State) -> State:
            proven = state.previous if state.trial else state.active
            if digest == proven:
                state = replace(state, active=digest, previous=state.active, trial=0)
            elif digest != state.active:
                state = replace(
                    state, active=digest, previous=proven, trial=int(trial), doubts=doubts
                )
            bad = {each: how for each, how in state.bad.items() if each != digest}
            return self._with_event(replace(state, bad=bad), "activated", digest, by, why)

        return self._change(change)

    def record_named(self, digest: str) -> None:
        """Record that the command to serve names this bundle."""
        self._change(lambda state: replace(state, named=digest))

    def record_trial(self, digest: str) -> None:
        """Record that a bundle, by its whole digest, has passed a trial on this machine."""

        def change(state: State) -> State:
            others = [each for each in state.tried if each != digest]
            return replace(state, tried=(*others, digest)[-_TRIED:])

        self._change(change)

    def record_refusal(self, digest: str, by: str, why: str) -> None:
        """Record that a bundle was not accepted."""
        self._change(lambda state: self._with_event(state, "refused", digest, by, why))

    def record_confirmation(self, by: str) -> None:
        """Record that the active bundle has passed its probation."""
        self._change(
            lambda state: self._with_event(replace(state, trial=0), "confirmed", state.active, by)
        )

    def record_kept(self, by: str, why: str) -> None:
        """Record that the active bundle has failed and stays,
        since there is no other to go back to.
        """
        self._change(
            lambda state: self._with_event(
                replace(state, previous="", trial=0), "kept", state.active, by, why
            )
        )

    def record_start(self, trial: int) -> None:
        """Record how often a daemon has started with the bundle that is on probation."""
        self._change(lambda state: replace(state, trial=trial))

    def record_rollback(self, by: str, why: str, *, failed: bool) -> State:
        """Make the previous bundle the active one.

        A bundle that `failed` is not accepted again without --force.
        """

        def change(state: State) -> State:
            left = state.active
            failures = {**state.bad, left: why} if failed else state.bad
            bad = dict(list(failures.items())[-_BAD:])
            previous = "" if failed else left
            state = replace(state, active=state.previous, previous=previous, trial=0, bad=bad)
            return self._with_event(state, "rolled back", left, by, why)

        return self._change(change)

    @contextmanager
    def lock(self, patience: float = 0) -> Iterator[None]:
        """Hold the lock of the process that serves from this store;
        waits `patience` seconds for it.

        Raises:
            StoreInUseError: another process holds it.
            EdgeNodeError: the folder cannot be written.
        """
        self.create_folder()
        with (self.folder / _LOCK).open("a+") as file:
            deadline = time.monotonic() + patience
            while not _try_lock(file.fileno()):
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise StoreInUseError(
                        f"the bundles in {self.folder} are served by process "
                        f"{file.read().strip() or '?'}",
                        "stop that line, or give this one a folder of its own: --state FOLDER",
                    )
                time.sleep(_PAUSE)
            with disk.writing(self.folder):
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            yield

    def is_locked(self) -> bool:
        """Whether a process serves from this store."""
        try:
            with self.lock():
                return False
        except StoreInUseError:
            return True

    def create_folder(self) -> None:
        """Create the folder, accessible to its owner alone;
        UsageError when it is another user's.
        """
        with disk.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.check_owner()

    def check_owner(self) -> None:
        """UsageError when the store is another user's:
        its line could not change what we would write there.

        A store that does not exist yet is that of the state folder's owner, if root would make it.
        """
        folder = self.folder
        if os.geteuid() == 0:
            line_folders = (folder, *folder.parents[:2])
            folder = next((each for each in line_folders if each.exists()), folder)
        if folder.exists() and (owner := folder.stat().st_uid) != os.geteuid():
            raise UsageError(
                f"{folder} is of user {owner}, not yours",
                "run the command as the line's user: sudo -u USER ...",
            )

    def _is_intact(self, digest: str) -> bool:
        """Whether a bundle is there and complete; if so, it becomes the newest."""
        try:
            bundle.read_bundle(self.path(digest))
        except BundleError:
            return False
        os.utime(self.path(digest))
        return True

    def _copy(self, folder: Path, digest: str) -> None:
        manifest = bundle.parse_manifest(folder, bundle.load_manifest(folder))
        scratch = self.folder / f".{digest}-{uuid.uuid4().hex}"
        target = self.path(digest)
        with disk.writing(self.folder):
            scratch.mkdir(mode=0o700)
            for name in bundle.file_names(manifest):
                if (folder / name).exists():
                    bundle.copy_file(folder, name, scratch)
                    disk.sync(scratch / name)
        if not bundle.read_bundle(scratch).digest.startswith(digest):  # the copy is what counts
            raise BundleError(f"{folder} has become another bundle meanwhile", "start again")
        with disk.writing(self.folder):
            if target.exists():  # damaged
                target.rename(scratch.with_name(f"{scratch.name}.old"))
            disk.move_durably(scratch, target)

    def _prune(self, added: str) -> None:
        """Delete the oldest bundles, and partial copies that a kill has left."""
        state = self.state()
        others = [
            each for each in self.digests() if each not in (state.active, state.previous, added)
        ]
        for path in [*(self.path(each) for each in others[KEPT - 1 :]), *self.folder.glob(".*-*")]:
            shutil.rmtree(path, ignore_errors=True)

    def _change(self, change: Callable[[State], State]) -> State:
        with self._locked() as apply:
            return apply(change)

    @property
    def head(self) -> RecordHead | None:
        """The head of the record of what has happened here;
        EdgeNodeError when it cannot be read.
        """
        return line_record.head(self.folder, self.state().history)

    def _with_event(self, state: State, what: What, digest: str, by: str, why: str = "") -> State:
        head = line_record.head(self.folder, state.history)
        sha256 = ""
        with suppress(BundleError):
            sha256 = bundle.read_digest(self.path(digest))
        number = head.entries + 1 if head else 1
        before = head.digest if head else ""
        event = Event(
            what=what,
            bundle=digest,
            time=current_time(),
            by=by,
            why=why,
            sha256=sha256,
            serving=state.active,
            number=number,
            before=before,
        )
        return replace(state, history=(*state.history, event)[-_HISTORY:])

    @contextmanager
    def _locked(self) -> Iterator[Callable[[Callable[[State], State]], State]]:
        """Lock the store against other changes; yields a function that replaces the state."""
        self.create_folder()

        def apply(change: Callable[[State], State]) -> State:
            state = change(self.state())
            with disk.writing(self.folder):
                checksums.write_record(self.folder / "state.json", state)
            line_record.copy(self.folder, state.history)
            return state

        with disk.writing(self.folder):
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield apply
        finally:
            os.close(descriptor)


def running_lines() -> list[tuple[Path, str]]:
    """The state folder and the name of each line that runs on this machine,
    as far as we may look.
    """
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended meanwhile
            lock = link.readlink()
            if lock.name == _LOCK and lock.parents[1].name == _FOLDER:
                found.add((lock.parents[2], lock.parent.name))
    return sorted(found)


def list_lines(state: Path) -> list[tuple[Path, str]]:
    """Return folder and name of each line with a store in a state folder, running or not."""
    return sorted((state, store.parent.name) for store in state.glob(f"{_FOLDER}/*/state.json"))


def line_store(state: Path, line: str) -> BundleStore:
    """The store of a line in its state folder; UsageError for an invalid name."""
    return BundleStore(state / _FOLDER / check_name(line, "the line's name"))


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
