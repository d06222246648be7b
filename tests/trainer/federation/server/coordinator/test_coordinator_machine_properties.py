"""A coordinator under random nodes, beside its ledger: each contribution counts once,
and nobody is left behind.
"""

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker_config.protocol.messages import Contribution, Finished, Hello
from tests.support.node_model import RUN, make_spec
from trainer.federation.server.coordinator import round_state
from trainer.federation.server.coordinator.coordinator_machine import advance
from trainer.federation.server.coordinator.coordinator_state import Coordination, ProcessPlan
from trainer.federation.server.coordinator.effects import (
    Accept,
    Admit,
    Close,
    Collect,
    Fail,
    Finish,
    Open,
    RecordFinished,
    Refuse,
    WelcomeNewcomer,
)
from trainer.federation.server.coordinator.events import (
    Acted,
    Contributed,
    Event,
    Joined,
    Left,
    Opened,
    Refused,
    Started,
    Tick,
    Told,
)
from trainer.federation.server.operator_actions import make_action

NAMES = ("plant-a", "plant-b", "plant-c")
NEWCOMER, LINGER = "plant-d", 60.0
SESSION = "1" * 16


class Coordinations(RuleBasedStateMachine):
    """The coordinator's shell, and what its ledger and its nodes hold."""

    @initialize(quorum=st.integers(1, 3), statistics=st.booleans())
    def begin(self, quorum: int, statistics: bool) -> None:
        self.plan = ProcessPlan(
            make_spec(rounds=3, statistics=statistics),
            "5" * 16,
            Path("state"),
            LINGER,
            serves_newcomers=False,
        )
        of_all = frozenset((self.plan.spec.rounds,) if statistics else ())
        self.rounds_plan = round_state.Plan(
            len(NAMES), quorum, self.plan.spec.rounds, of_all=of_all
        )
        self.members, self.finished = set[str](), set[str]()  # recorded
        self.counted: dict[int, set[str]] = {}  # recorded, by round
        self.round, self.now = 0, 0.0  # recorded; the clock
        self.is_held = False  # recorded: its operator has paused it
        self.connected = set[str]()
        self.uploading: dict[str, Contribution] = {}
        self.start()

    def start(self) -> None:
        """A process begins, from what is recorded."""
        self.uploading = {}
        counted = self.counted.get(self.round, set())
        state = round_state.restore(
            self.rounds_plan, self.round, self.members, (), counted
        )._replace(held=self.is_held)
        self.state = Coordination(self.plan, state, self.now, opened=self.now, joined=self.now)
        self.apply(Started())

    # Events

    @rule(node=st.sampled_from((*NAMES, NEWCOMER)), reached=st.integers(0, 3))
    def says_hello(self, node: str, reached: int) -> None:
        """Whom the membership lets in: who has a place, or a newcomer to the result."""
        if node == NEWCOMER and not self.state.is_newcomer(node):
            return
        session = SESSION if node in self.connected else None
        self.connected.add(node)
        hello = Hello(session=SESSION, run=RUN, software="1", round=reached)
        newest = max((round_ for round_, nodes in self.counted.items() if node in nodes), default=0)
        is_in_totals = node in self.counted.get(self.plan.spec.rounds, ())
        self.apply(Joined(node, hello, session, newest, is_in_totals))

    @rule(node=st.sampled_from((*NAMES, NEWCOMER)))
    def is_lost(self, node: str) -> None:
        self.connected.discard(node)
        self.apply(Left(node, node in self.finished))

    @rule(node=st.sampled_from(NAMES))
    def is_refused(self, node: str) -> None:
        self.connected.discard(node)
        self.apply(Refused(node))

    @rule(node=st.sampled_from(NAMES), back=st.integers(-1, 1))
    def offers(self, node: str, back: int) -> None:
        """To the open round, the one before, or the next; again, if the answer was lost."""
        round_ = max(1, self.state.rounds.round - back)
        if node in self.state.rounds.members:
            message = Contribution(session=SESSION, run=RUN, round=round_, weight=1.0, blob=None)
            self.apply(Told(node, message, node in self.counted.get(round_, ())))

    @precondition(lambda self: self.uploading)
    @rule(data=st.data())
    def an_upload_arrives(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.uploading)))
        self.add(node)

    @rule(node=st.sampled_from((*NAMES, NEWCOMER)))
    def has_its_model(self, node: str) -> None:
        self.apply(Told(node, Finished(session=SESSION, run=RUN)))

    @rule(seconds=st.sampled_from((0.2, 20.0, LINGER)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.apply(Tick(self.now, self.finished, self.connected))
        if self.state.is_over:
            assert self.state.is_finished
            assert self.state.present <= self.finished | self.state.excluded, (
                "somebody still wants the result"
            )

    @rule(is_held=st.booleans())
    def is_paused_or_resumed(self, is_held: bool) -> None:
        """Recorded first, whatever becomes of the process."""
        self.is_held = is_held
        self.apply(Acted(make_action(RUN, "pause" if is_held else "resume", "anna")))

    @rule()
    def coordinator_restarts(self) -> None:
        self.connected.clear()
        self.start()

    # Effects

    def add(self, node: str) -> None:
        message = self.uploading.pop(node)
        self.counted.setdefault(message.round, set()).add(node)
        self.apply(Contributed(node, message))

    def apply(self, event: Event) -> None:
        self.state, effects = advance(self.state, event)
        for effect in effects:
            match effect:
                case Admit(node):
                    assert node in NAMES
                    self.members.add(node)
                case WelcomeNewcomer(node):
                    assert node not in self.members
                case Open(round_):
                    assert not self.is_held
                    assert round_ == self.round + 1
                    self.round = round_
                    self.apply(Opened(self.now))
                case Close(round_, contributors):
                    assert contributors == self.counted[round_]
                    self.uploading = {}
                case Finish():
                    self.round += 1
                case Collect(node, message):
                    assert message.round == self.round
                    assert node not in self.counted.get(self.round, ()), "it would be summed twice"
                    self.uploading[node] = message
                case Accept(node, accepted):
                    assert accepted.counted == (node in self.counted.get(accepted.round, ()))
                case RecordFinished(node):
                    self.finished.add(node)
                case Refuse(error):
                    assert "is not open" in str(error)
                case Fail(error):
                    raise error

    # What is promised

    @invariant()
    def it_stands_where_its_ledger_does(self) -> None:
        assert self.state.rounds.members == self.members
        if self.state.rounds.status is round_state.Status.OPEN:
            assert self.state.rounds.contributed == self.counted.get(self.round, set())

    def teardown(self) -> None:
        """When all nodes come and stay, and nobody pauses it, the run ends,
        and so does the coordinator.
        """
        if not hasattr(self, "state"):
            return
        self.is_lost(NEWCOMER)
        self.is_paused_or_resumed(is_held=False)
        for _ in range(self.plan.spec.rounds + 1):
            for node in NAMES:
                self.says_hello(node, self.plan.spec.rounds)
                self.offers(node, 0)
                if node in self.uploading:
                    self.add(node)
        assert self.state.is_finished
        for node in NAMES:
            self.has_its_model(node)
        self.time_passes(0.2)
        assert self.state.is_over


Coordinations.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
test_coordinators_keep_their_promises = Coordinations.TestCase
