"""The round's state machine under random events,
beside a model of what docs/protocol.md promises.
"""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.round_events import contributed, joined
from tests.support.round_events import held as held_event
from trainer.federation.server.coordinator.effects import Close, Effect, Finish, Open, Pause, Resume
from trainer.federation.server.coordinator.events import (
    Event,
    Expired,
    Left,
    Started,
)
from trainer.federation.server.coordinator.round_machine import advance
from trainer.federation.server.coordinator.round_state import Federation, Plan, Status, restore

NAMES = [f"node-{number}" for number in range(4)]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that a spec can have."""
    nodes = draw(st.integers(1, len(NAMES)))
    sample = draw(st.sampled_from((0, *range(1, nodes + 1))))
    quorum = draw(st.integers(1, sample or nodes))
    rounds, seed = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    of_all = frozenset(draw(st.sampled_from(((), (rounds,), (1, rounds)))))
    return Plan(nodes, quorum, rounds, sample, seed, of_all)


def play(state: Federation, events: Iterable[Event]) -> tuple[Federation, list[Effect]]:
    effects: list[Effect] = []
    for event in events:
        state, new = advance(state, event)
        effects += new
    return state, effects


class Rounds(RuleBasedStateMachine):
    """What the coordinator does with the state machine, and what its journal holds of it."""

    @initialize(plan=plans(), present=st.integers(0, len(NAMES)))
    def begin(self, plan: Plan, present: int) -> None:
        """Some nodes or all are there from the start: else few rounds would open."""
        self.plan = plan
        self.state = Federation(plan)
        self.opened, self.closed, self.finished, self.paused = 0, 0, False, False
        self.members: set[str] = set()  # journalled
        self.drawn: frozenset[str] = frozenset()  # journalled
        self.contributors: set[str] = set()  # journalled, of the open round
        self.present: set[str] = set()
        self.expired = self.held = False
        for node in NAMES[: min(present, plan.nodes)]:
            self.join(node)

    # Events

    @rule(data=st.data())
    def joins(self, data: st.DataObject) -> None:
        """For the first time or again; places are counted by the membership."""
        self.join(data.draw(st.sampled_from(NAMES[: self.plan.nodes])))

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.members)))
        self.present.discard(node)
        self.apply(Left(node))

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def contributes(self, data: st.DataObject) -> None:
        """Again, undrawn, when it has left, or at the wrong time: whatever the network brings."""
        self.contribute(data.draw(st.sampled_from(sorted(self.members))))

    @rule()
    def all_who_are_missing_contribute(self) -> None:
        round_ = self.state.round
        for node in sorted(self.state.missing):
            if self.state.round == round_:
                self.contribute(node)

    @rule(back=st.integers(0, 1))
    def expires(self, back: int) -> None:
        self.expired |= back == 0 and self.state.status is Status.OPEN
        self.apply(Expired(self.state.round - back))

    @precondition(lambda self: self.state.status is Status.OPEN)
    @rule()
    def a_quorum_contributes_and_the_rest_is_late(self) -> None:
        round_ = self.state.round
        for node in sorted(self.state.missing)[: self.plan.quorum]:
            self.contribute(node)
        if self.state.round == round_:
            self.expires(0)

    @rule(held=st.booleans())
    def operator_pauses_or_resumes(self, held: bool) -> None:
        """Again and again, and whatever holds already."""
        self.held = held
        self.apply(held_event(held))

    @rule()
    def coordinator_restarts(self) -> None:
        """What it knew of who is there comes again, and then it stands where it stood,
        having done nothing twice.
        """
        self.state, effects = self.restarted()
        assert [effect for effect in effects if not isinstance(effect, Pause | Resume)] == []

    @precondition(lambda self: self.state.status is Status.OPEN and self.state.missing)
    @rule(data=st.data())
    def coordinator_dies_between_a_contribution_s_journalling_and_its_effect(
        self, data: st.DataObject
    ) -> None:
        node = data.draw(st.sampled_from(sorted(self.state.missing)))
        expected, effects = advance(self.state, contributed(node))
        self.journal(node)
        state, late = self.restarted()
        kinds = Open | Close | Finish
        assert [each for each in late if isinstance(each, kinds)] == [
            each for each in effects if isinstance(each, kinds)
        ]
        assert state == expected
        self.state = state
        self.check(effects)

    def restarted(self) -> tuple[Federation, list[Effect]]:
        """The state after a restart, when the clock and those who are there have been heard
        again.
        """
        before, round_ = self.state, self.closed + 1 if self.opened else 0
        state = restore(self.plan, round_, self.members, self.drawn, self.contributors)._replace(
            held=self.held
        )
        gone = [Left(node) for node in sorted(self.members - before.present)]
        here = [joined(node) for node in sorted(before.present)]
        clock = [Expired(round_)] if before.expired else []
        state, effects = play(state, [Started(), *here, *gone, *clock])
        return state, effects

    def journal(self, node: str) -> None:
        """The ledger takes in contributions of those who take part, once."""
        if self.state.status is Status.OPEN and self.state.takes_part(node):
            self.contributors.add(node)

    def join(self, node: str) -> None:
        self.members.add(node)
        self.present.add(node)
        self.apply(joined(node))

    def contribute(self, node: str) -> None:
        self.journal(node)
        self.apply(contributed(node))

    def apply(self, event: Event) -> None:
        before = self.state
        self.state, effects = advance(before, event)
        self.check(effects)

    # What is promised

    def check(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            assert not self.finished
            assert not (self.held and isinstance(effect, Open | Close | Finish))
            match effect:
                case Open(round_, drawn):
                    assert round_ == self.opened + 1 == self.closed + 1
                    assert round_ > 1 or len(self.present) >= self.needed_to_open()
                    sample = 0 if round_ in self.plan.of_all else self.plan.sample
                    assert len(drawn) == min(sample, len(self.members))
                    assert drawn <= self.members
                    self.opened, self.drawn, self.contributors = round_, drawn, set()
                    self.expired = False
                case Close(round_, contributors):
                    assert round_ == self.closed + 1 == self.opened
                    assert contributors == self.contributors
                    assert len(contributors) >= self.plan.quorum
                    if not (
                        self.expired or len(contributors) == (len(self.drawn) or self.plan.nodes)
                    ):
                        assert not (self.drawn or self.present) & self.present - contributors
                    self.closed = round_
                case Finish():
                    assert self.closed == self.opened == self.plan.rounds
                    self.finished = True
                case Pause(round_) | Resume(round_):
                    assert round_ == self.state.round
                    assert self.paused is isinstance(effect, Resume)
                    self.paused = isinstance(effect, Pause)

    def needed_to_open(self) -> int:
        """All nodes where some are drawn from all, and else a quorum."""
        return self.plan.nodes if self.plan.sample else self.plan.quorum

    @invariant()
    def it_says_where_it_is(self) -> None:
        if self.finished:
            assert self.state.status is Status.FINISHED
        elif self.opened:
            assert (self.state.status, self.state.round) == (Status.OPEN, self.closed + 1)
        else:
            assert self.state.status is Status.GATHERING
        assert self.state.members == self.members

    @invariant()
    def it_is_paused_if_and_only_if_fewer_than_the_quorum_can_contribute(self) -> None:
        can = len(self.state.missing | self.state.contributed)
        assert self.state.paused == (self.state.status is Status.OPEN and can < self.plan.quorum)
        assert self.finished or self.paused == self.state.paused  # as its effects have told

    @invariant()
    def nothing_that_is_due_is_left_undone(self) -> None:
        state, plan = self.state, self.plan
        if self.held:
            return
        if state.status is Status.GATHERING:
            assert len(state.present) < self.needed_to_open()
        if state.status is Status.OPEN and len(self.contributors) >= plan.quorum:
            assert not self.expired
            assert (self.drawn or self.present) & self.present - self.contributors

    @invariant()
    def it_can_always_be_finished(self) -> None:
        """If all nodes come, contribute and stay, without a deadline,
        and the operator lets them.
        """
        state, _ = advance(self.state, held_event(False))
        for node in [*sorted(self.members), *NAMES]:
            if node in state.members or len(state.members) < self.plan.nodes:
                state, _ = advance(state, joined(node))
        for _ in range(self.plan.rounds * (len(NAMES) + 1)):
            for node in sorted(state.missing):
                state, _ = advance(state, contributed(node))
        assert state.status is Status.FINISHED


Rounds.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
test_rounds_keep_their_promises = Rounds.TestCase
