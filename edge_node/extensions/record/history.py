"""The history that a record tells, entry by entry.

A chain of hashes proves that its entries stand as they were written, not that they may stand there.
So each entry is held against those before it: a record is of runs or of a line, a run begins once,
its rounds close once, in order, and what stands already is never replaced.
"""

from dataclasses import dataclass, field
from itertools import chain

import msgspec

from broker_config.protocol.messages import Spec
from broker_config.protocol.topics import COORDINATOR, MONITOR
from broker_config.storage.hash_chain import Entry
from edge.registry.line_record import Event
from trainer.federation.server.record_facts import Fact, RoundClosed, RunBegun, RunEnded

_FACTS = {"run begun", "round closed", "run ended"}
_EVENTS = {"added", "activated", "refused", "confirmed", "rolled back", "kept"}


class ContradictionError(ValueError):
    """An entry that cannot stand where it does; the text says briefly why."""


@dataclass
class Run:
    """A run as a record has it."""

    begun: RunBegun
    spec: Spec
    rounds: dict[int, RoundClosed] = field(default_factory=dict)
    ended: RunEnded | None = None

    @property
    def contributors(self) -> set[str]:
        """The members that have contributed to any of its rounds."""
        return set(chain.from_iterable(closed.contributions for closed in self.rounds.values()))

    def took_part(self, node: str) -> list[int]:
        """The rounds to which a member contributed."""
        return [round_ for round_, closed in self.rounds.items() if node in closed.contributions]


@dataclass
class History:
    """What the entries of a record say, as far as they were added."""

    runs: dict[str, Run] = field(default_factory=dict)  # in order
    events: list[Event] = field(default_factory=list)  # of a line
    # the full digest of each bundle that events name by its first digits
    bundles: dict[str, str] = field(default_factory=dict)
    unknown: int = 0  # entries of kinds that this version does not know

    def add(self, entry: Entry) -> None:
        """Take in the next entry.

        Raises:
            ContradictionError: it is malformed, or may not follow those before it.
        """
        what = entry.get("what")
        if not isinstance(what, str):
            raise ContradictionError("it does not say what has happened (`what`)")
        try:
            if what in _EVENTS:
                self._add_event(msgspec.convert(entry, Event))
            elif what in _FACTS:
                self._add_fact(msgspec.convert(entry, Fact))
            else:
                self.unknown += 1
        except msgspec.ValidationError as error:
            raise ContradictionError(str(error)) from None

    def check_signer(self, name: str, federation: str) -> None:
        """Raise ContradictionError unless this member of the federation may say all of it."""
        if self.events and name in (COORDINATOR, MONITOR):
            raise ContradictionError(f"a line's events are its node's, and {name} is none")
        if self.runs and name != COORDINATOR:
            raise ContradictionError(f"runs are the coordinator's, and {name} is not that")
        for run, known in self.runs.items():
            if known.spec.federation != federation:
                raise ContradictionError(
                    f"run {run} in it is of federation {known.spec.federation!r}, and it is "
                    f"signed for {federation!r}"
                )

    def _add_event(self, event: Event) -> None:
        if self.runs:
            raise ContradictionError("it is a line's, and those before it are a coordinator's")
        # A digest that does not begin so is that of a damaged manifest: it names no bundle.
        if event.sha256 and event.sha256.startswith(event.bundle):
            known = self.bundles.setdefault(event.bundle, event.sha256)
            if known != event.sha256:
                raise ContradictionError(f"bundle {event.bundle} has been another one before")
        self.events.append(event)

    def _add_fact(self, fact: Fact) -> None:
        if self.events:
            raise ContradictionError("it is a coordinator's, and those before it are a line's")
        if isinstance(fact, RunBegun):
            self._begin(fact)
            return
        run = self.runs.get(fact.run)
        if run is None:
            raise ContradictionError(f"run {fact.run} has not begun")
        if fact.run != next(reversed(self.runs)):
            raise ContradictionError(f"run {fact.run} was over: another one had begun")
        if run.ended:
            raise ContradictionError(f"run {fact.run} had ended")
        if isinstance(fact, RoundClosed):
            _check_round(run, fact)
            run.rounds[fact.round] = fact
            return
        if fact.outcome == "finished" and len(run.rounds) != run.spec.rounds:
            raise ContradictionError(
                f"run {fact.run} has finished after {len(run.rounds)} of {run.spec.rounds} rounds"
            )
        run.ended = fact

    def _begin(self, begun: RunBegun) -> None:
        spec = msgspec.convert(begun.spec, Spec)
        if begun.run in self.runs:
            raise ContradictionError(f"run {begun.run} begins a second time")
        if spec.run != begun.run:
            raise ContradictionError(f"run {begun.run} has the spec of run {spec.run}")
        self.runs[begun.run] = Run(begun, spec)


def _check_round(run: Run, closed: RoundClosed) -> None:
    """Raise ContradictionError unless this is how the run's next round can close."""
    name = f"round {closed.round} of run {closed.run}"
    due = len(run.rounds) + 1
    if due > run.spec.rounds:
        raise ContradictionError(f"{name} closes, and the run has {run.spec.rounds} rounds")
    if closed.round != due:
        raise ContradictionError(f"{name} closes where round {due} is due")
    contributors = closed.contributions.keys()
    if reserved := sorted(contributors & {COORDINATOR, MONITOR}):
        raise ContradictionError(f"{reserved[0]} has contributed to {name}, and is no node")
    if len(contributors) > run.spec.nodes:
        raise ContradictionError(
            f"{len(contributors)} nodes have contributed to {name}, which has places for "
            f"{run.spec.nodes}"
        )
    # The others take part where the operator has dropped all who were drawn.
    drawn = frozenset(closed.drawn)
    if contributors & drawn and (strange := sorted(contributors - drawn)):
        raise ContradictionError(f"{strange[0]} has contributed to {name} and was not drawn for it")
