"""Actions of a federation's operator: a file in the coordinator's state folder,
to which they are added one by one.

Who can write there may act, so its permissions are the access control. The coordinator carries out
what is added while it runs. When it starts it reads all of them: the file is also how it knows,
after a kill, what holds. A damaged file is refused: it may be the one that says who was dropped.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from broker_config.protocol.errors import EdgeNodeError, UsageError, explain_scarcity, suggest
from broker_config.protocol.messages import Name, RunId
from broker_config.storage import disk
from broker_config.storage.checked_log import CheckedLog
from broker_config.storage.checksums import DamagedError
from trainer.federation.server import journal
from trainer.federation.server.ledger import least_nodes

FILE = "actions.jsonl"

Kind = Literal["pause", "resume", "drop", "abort"]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an operator wants."""

    run: RunId
    what: Kind
    by: Name
    time: float  # seconds since 1970
    node: Name | None = None  # that is dropped
    reason: str = ""  # of an abort, for the nodes' owners


class Control(NamedTuple):
    """What an operator's actions amount to."""

    is_paused: bool = False
    dropped: frozenset[str] = frozenset()  # nodes
    aborted: Action | None = None

    def after(self, action: Action, most_dropped: int) -> "Control":
        """What it is after one more action; the same if that changes nothing,
        or would leave too few nodes.
        """
        match action:
            case Action(what="pause" | "resume" as what):
                return self._replace(is_paused=what == "pause")
            case Action(what="drop", node=str(node)) if len(self.dropped) < most_dropped:
                return self._replace(dropped=self.dropped | {node})
            case Action(what="abort"):
                return self._replace(aborted=self.aborted or action)
        return self


def replay(actions: Iterable[Action], most_dropped: int) -> Control:
    """What these actions amount to, one after the other."""
    found = Control()
    for action in actions:
        found = found.after(action, most_dropped)
    return found


def act(folder: Path, action: Action) -> None:
    """Add an action; it is on the disk when this returns.

    EdgeNodeError if the disk fails, or the actions before it are damaged.
    """
    log = _open(folder)
    try:
        with disk.writing(folder):
            log.append(action)
    except DamagedError as error:
        raise _damaged(log.path, error) from None


def make_action(run: str, what: Kind, by: str, node: str | None = None, reason: str = "") -> Action:
    """An action of now."""
    return Action(run=run, what=what, by=by, time=round(time.time(), 3), node=node, reason=reason)


def request(
    folder: Path, what: Kind, by: str, node: str | None = None, run: str = "", reason: str = ""
) -> Action:
    """Have whoever coordinates the newest run in a state folder do something;
    it is on the disk when this returns.

    Args:
        folder: state folder of a coordinator.
        what: what to do.
        by: who wants it.
        node: the one to drop.
        run: that must be the newest; empty: whichever it is.
        reason: of an abort, for the nodes' owners.

    Raises:
        UsageError: nobody coordinates that run, it has ended, there is no such node, or too few
            would be left.
        EdgeNodeError: the journal cannot be read, or the disk fails.
    """
    found = journal.newest_run(folder)
    spec = found.spec
    if run in ("", spec.run) and found.outcome:
        raise UsageError(f"this run is {found.outcome}", "there is nothing to change any more")
    if run not in ("", spec.run) or not disk.is_locked(folder):
        raise UsageError(
            "nobody coordinates this run now", "start edge-node coordinate, then try again"
        )
    if what == "drop" and node not in found.members:
        raise UsageError(
            f"this run has no node {node!r}", suggest(str(node), sorted(found.members))
        )
    action = make_action(spec.run, what, by, node, reason)
    most_dropped = spec.nodes - least_nodes(spec)
    before = replay(ActionReader(folder, spec.run).read(), most_dropped)
    if (
        what == "drop"
        and before.after(action, most_dropped) == before
        and node not in before.dropped
    ):
        raise UsageError(
            f"{node} cannot be dropped: too few nodes would be left",
            "abort the run, and begin another one",
        )
    act(folder, action)
    return action


class ActionReader:
    """Reads what is added to a folder's actions on one run."""

    def __init__(self, folder: Path, run: str) -> None:
        self._log = _open(folder)
        self._run = run

    def read(self) -> list[Action]:
        """What has been added since the last time; EdgeNodeError if that cannot be read."""
        try:
            found = self._log.read()
        except (OSError, DamagedError) as error:
            raise explain_scarcity(error) or _damaged(self._log.path, error) from None
        return [action for action in found if action.run == self._run]


def _open(folder: Path) -> CheckedLog[Action]:
    return CheckedLog(folder / FILE, _decoder, mode=0o600)


def _damaged(path: Path, error: Exception) -> EdgeNodeError:
    return EdgeNodeError(
        f"the operator's actions in {path} cannot be read: {error}",
        f"restore it from a copy, or remove {path} and {path}.newest: pause or drop again then, "
        "since nothing that an operator has done holds any more",
    )


_decoder = msgspec.json.Decoder(Action)
