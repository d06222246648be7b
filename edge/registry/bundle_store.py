"""The bundles that a line has, which of them it serves, and what has become of each: a folder.

    BUNDLE/       a bundle, by the first 12 digits of its digest
    state.json    which one is served and which one before; who did what, when and why
    requests/     what `edge-node bundle` asks of a running daemon (`desk`)

Every change is one rename of something that is safe on the disk: a kill at any moment leaves the old or the new.
"""

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import check_name
from broker_config.storage import disk
from edge.bundle import bundle_format as bundle
from edge.bundle.bundle_format import BundleError, Manifest
from edge.inference.verdict import current_time

KEPT = 8  # bundles; those that are served, or were before, besides
_HISTORY = 200  # events
_BAD = 100  # bundles that are known to be bad, also when they are not kept any more
_DIGITS = 12
_PAUSE = 0.05  # seconds between two looks at a lock


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened to a bundle."""

    what: Literal["added", "activated", "refused", "confirmed", "rolled back", "kept"]
    bundle: str
    time: str  # ISO 8601, UTC
    by: str  # who wanted it
    why: str = ""


class State(Struct, frozen=True, kw_only=True):
    """What a line serves, and how it came to that."""

    active: str = ""  # a bundle's digits; empty: none yet
    previous: str = ""  # to which the line goes back
    trial: int = 0  # starts of the daemon since `active` is on probation; 0: it is not
    doubts: float | None = None  # share of the verdicts before `active` that were doubted; probation compares
    bad: dict[str, str] = {}  # bundles that failed in service, and how
    history: tuple[Event, ...] = ()  # the newest last


class StoreInUseError(UsageError):
    """A daemon serves from this store."""


class Store:
    """A line's bundles. Several processes may use it; each change is made by one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def state(self) -> State:
        """What is served; EdgeNodeError when that cannot be read."""
        path = self.folder / "state.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=State)
        except FileNotFoundError:
            return State()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(
                f"which bundle this line serves cannot be read from {path}: {error}",
                "restore the file, or remove it and name the bundle: edge-node serve BUNDLE",
            ) from None

    def path(self, digest: str) -> Path:
        """Where a bundle lies, or would."""
        return self.folder / digest[:_DIGITS]

    def digests(self) -> list[str]:
        """The bundles that are kept, the one that was added last first."""
        found = [path for path in self.folder.glob("[0-9a-f]" * _DIGITS) if path.is_dir()]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)]

    def manifest(self, digest: str) -> Manifest:
        """What a bundle says about itself; BundleError when it is damaged."""
        folder = self.path(digest)
        return bundle.parse_manifest(folder, bundle.load_manifest(folder))

    def find(self, digits: str) -> str:
        """The one bundle whose digest begins so; UsageError when there is none, or several."""
        found = [each for each in self.digests() if digits and each.startswith(digits)]
        if len(found) != 1:
            raise UsageError(
                f"{len(found) or 'no'} bundles in {self.folder} begin with {digits!r}",
                "edge-node bundle list shows what there is; edge-node bundle add BUNDLE adds one",
            )
        return found[0]

    def add(self, folder: Path, by: str, digest: str = "") -> str:
        """Copy a bundle into the store, unless it is there; return its digest's first digits.

        BundleError when it is damaged, or not the one of `digest`; EdgeNodeError when the disk does not take it.
        """
        found = bundle.read_bundle(folder).digest[:_DIGITS]
        if digest and found != digest:
            raise BundleError(f"{folder} has become another bundle meanwhile", "start again")
        with self._changing() as change:
            if not self._intact(found):
                self._copy(folder, found)
                change(lambda state: _with(state, "added", found, by))
            self._prune(found)
        return found

    def activated(
        self, digest: str, by: str, why: str = "", *, trial: bool = True, doubts: float | None = None
    ) -> State:
        """Serve a bundle from now on. What was served before, and has passed its probation, is the way back.

        `doubts` is the share of its verdicts that were doubted, if it is known.
        """

        def change(state: State) -> State:
            proven = state.previous if state.trial else state.active
            if digest == proven:
                state = replace(state, active=digest, previous=state.active, trial=0)
            elif digest != state.active:
                state = replace(state, active=digest, previous=proven, trial=int(trial), doubts=doubts)
            bad = {each: how for each, how in state.bad.items() if each != digest}
            return _with(replace(state, bad=bad), "activated", digest, by, why)

        return self._change(change)

    def refused(self, digest: str, by: str, why: str) -> None:
        """Write down that a bundle was not taken."""
        self._change(lambda state: _with(state, "refused", digest, by, why))

    def confirmed(self, by: str) -> None:
        """The bundle that is served has passed its probation."""
        self._change(lambda state: _with(replace(state, trial=0), "confirmed", state.active, by))

    def kept(self, by: str, why: str) -> None:
        """The bundle that is served has failed and stays, since there is no way back from it any more."""
        self._change(lambda state: _with(replace(state, previous="", trial=0), "kept", state.active, by, why))

    def started(self, trial: int) -> None:
        """Write down how often a daemon has started with the bundle that is on probation."""
        self._change(lambda state: replace(state, trial=trial))

    def rolled_back(self, by: str, why: str, *, failed: bool) -> State:
        """Serve the bundle before again. One that `failed` is not taken again, unless somebody insists."""

        def change(state: State) -> State:
            left = state.active
            bad = dict(list(({**state.bad, left: why} if failed else state.bad).items())[-_BAD:])
            state = replace(state, active=state.previous, previous="" if failed else left, trial=0, bad=bad)
            return _with(state, "rolled back", left, by, why)

        return self._change(change)

    @contextmanager
    def claimed(self, patience: float = 0) -> Iterator[None]:
        """Be the one who serves from this store; waits `patience` seconds for who is, it may be a command.

        Raises:
            StoreInUseError: somebody else still is.
            EdgeNodeError: the folder cannot be written.
        """
        self.make()
        with (self.folder / "daemon").open("a+") as file:
            deadline = time.monotonic() + patience
            while not _lock(file.fileno()):
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise StoreInUseError(
                        f"the bundles in {self.folder} are served by process {file.read().strip() or '?'}",
                        "stop that line, or give this one a folder of its own: --memory FOLDER",
                    )
                time.sleep(_PAUSE)
            with disk.writing(self.folder):
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            yield

    def served(self) -> bool:
        """Whether somebody serves from this store."""
        try:
            with self.claimed():
                return False
        except StoreInUseError:
            return True

    def make(self) -> None:
        """Make the folder, for its owner alone; UsageError when it is another user's."""
        with disk.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.check_owner()

    def check_owner(self) -> None:
        """UsageError when the store is another user's: what we would write there, its line could not change."""
        if self.folder.exists() and (owner := self.folder.stat().st_uid) != os.geteuid():
            raise UsageError(
                f"{self.folder} is of user {owner}, not yours", "run the command as the line's user: sudo -u USER ..."
            )

    def _intact(self, digest: str) -> bool:
        """Whether a bundle is there and whole; it counts as added now."""
        try:
            bundle.read_bundle(self.path(digest))
        except BundleError:
            return False
        os.utime(self.path(digest))
        return True

    def _copy(self, folder: Path, digest: str) -> None:
        manifest = bundle.parse_manifest(folder, bundle.load_manifest(folder))
        scratch, target = self.folder / f".{digest}-{uuid.uuid4().hex}", self.path(digest)
        with disk.writing(self.folder):
            scratch.mkdir(mode=0o700)
            for name in bundle.file_names(manifest):
                if (folder / name).exists():
                    shutil.copyfile(folder / name, scratch / name)
                    disk.sync(scratch / name)
        if not bundle.read_bundle(scratch).digest.startswith(digest):  # what was copied, not what was there
            raise BundleError(f"{folder} has become another bundle meanwhile", "start again")
        with disk.writing(self.folder):
            if target.exists():  # damaged
                target.rename(scratch.with_name(f"{scratch.name}.old"))
            disk.move_durably(scratch, target)

    def _prune(self, added: str) -> None:
        """Forget the oldest bundles, and what a kill has left half copied."""
        state = self.state()
        others = [each for each in self.digests() if each not in (state.active, state.previous, added)]
        for path in [*(self.path(each) for each in others[KEPT - 1 :]), *self.folder.glob(".*-*")]:
            shutil.rmtree(path, ignore_errors=True)

    def _change(self, change: Callable[[State], State]) -> State:
        with self._changing() as apply:
            return apply(change)

    @contextmanager
    def _changing(self) -> Iterator[Callable[[Callable[[State], State]], State]]:
        """Nobody else changes the store meanwhile; yields what replaces the state."""
        self.make()

        def apply(change: Callable[[State], State]) -> State:
            state = change(self.state())
            with disk.writing(self.folder):
                content = msgspec.json.format(msgspec.json.encode(state), indent=2)
                disk.replace_bytes(self.folder / "state.json", content, mode=0o600)
            return state

        with disk.writing(self.folder):
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield apply
        finally:
            os.close(descriptor)


def of_line(state: Path, line: str) -> Store:
    """The store of a line, in its state folder; UsageError for a name that no line can have."""
    return Store(state / "bundles" / check_name(line, "the line's name"))


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _with(
    state: State,
    what: Literal["added", "activated", "refused", "confirmed", "rolled back", "kept"],
    digest: str,
    by: str,
    why: str = "",
) -> State:
    event = Event(what=what, bundle=digest, time=current_time(), by=by, why=why)
    return replace(state, history=(*state.history, event)[-_HISTORY:])
