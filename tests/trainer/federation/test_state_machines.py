"""Nodes and their coordinator as state machines, without broker, clock and disk:
the result is always the same.

All nodes must contribute to each round. Whatever is killed, lost, repeated, or restored from an
older copy: no honest node is refused, and when the faults end, all have the result that a run
without faults has.
"""

import hashlib
from collections import deque
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker_config.protocol.messages import (
    AnyMessage,
    Contribution,
    Finished,
    Hello,
    Manifest,
    Presence,
    Welcome,
)
from broker_config.transfer.blob_transfer import Damaged
from tests.support.node_model import (
    FOLDER,
    RUN,
    NodeModel,
    make_broadcast,
    make_contribution,
    make_spec,
)
from trainer.federation.client import session_events as node_events
from trainer.federation.client import session_state
from trainer.federation.server.coordinator import (
    coordinator_machine,
    coordinator_state,
    effects,
    events,
    round_state,
)
from trainer.federation.server.membership import Membership
from trainer.federation.server.status import round_message

NAMES = ("plant-a", "plant-b")
SPEC = make_spec(rounds=3)
LINGER = 60.0


def aggregate(broadcast: Manifest) -> Manifest:
    """What a round of all nodes makes of its broadcast."""
    parts = [make_contribution(broadcast, name).digest for name in NAMES]
    content = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    return make_broadcast(SPEC, broadcast.round + 1, content)


FIRST = make_broadcast(SPEC, 1)
RESULT = aggregate(aggregate(aggregate(FIRST)))


class Ledger:
    """What is on the coordinator's disk."""

    def __init__(self) -> None:
        self.round, self.broadcast = 0, FIRST
        self.identities: dict[str, str] = {}
        self.finished: set[str] = set()
        self.counted: dict[int, dict[str, str]] = {}  # digests by round and node

    def copy(self) -> "Ledger":
        made = Ledger()
        made.round, made.broadcast = self.round, self.broadcast
        made.identities, made.finished = dict(self.identities), set(self.finished)
        made.counted = {round_: dict(nodes) for round_, nodes in self.counted.items()}
        return made


class CoordinatorModel:
    """The coordinator's machine, its membership, and what it has sent."""

    def __init__(self) -> None:
        self.ledger, self.process, self.now = Ledger(), 0, 0.0
        self.down: dict[str, deque[AnyMessage]] = {name: deque() for name in NAMES}
        self.has_been_over = False  # as the broker retains it
        self.start()

    def start(self) -> None:
        """A process begins, with what is on the disk."""
        self.process += 1
        self.session, ledger = f"{self.process:016x}", self.ledger
        plan = round_state.Plan(len(NAMES), len(NAMES), SPEC.rounds)
        counted = ledger.counted.get(ledger.round, {})
        federation = round_state.restore(plan, ledger.round, ledger.identities, (), counted)
        was_over = self.has_been_over and 0 < ledger.round <= SPEC.rounds
        self.state = coordinator_state.Coordination(
            coordinator_state.ProcessPlan(SPEC, self.session, Path("state"), LINGER),
            federation,
            self.now,
            was_over=was_over,
            opened=self.now,
            joined=self.now,
        )
        self.membership = Membership(len(NAMES), ledger.identities)
        self.uploads: dict[str, Contribution] = {}
        self.call_roll()
        self.advance(events.Started())

    def call_roll(self) -> None:
        self.send(*NAMES, message=Presence(session=self.session, online=True))
        self.publish()

    def publish(self) -> None:
        message = round_message(SPEC, self.state.rounds, self.ledger.broadcast)
        self.has_been_over |= message.status == "finished"
        self.send(*NAMES, message=type(message)(**{**_fields(message), "server": self.session}))

    def send(self, *names: str, message: AnyMessage) -> None:
        for name in names:
            self.down[name].append(message)

    def hear(self, node: NodeModel, said: object) -> None:
        name, session = node.plan.name, self.membership.session(node.plan.name)
        match said:
            case node_events.Announce(round_):
                self.admit(name, hello_of(node, round_))
            case node_events.Send(message) if message.session == session:
                counted = name in self.ledger.counted.get(message.round, {})
                self.advance(events.Told(name, message, counted))
            case node_events.TellFinished():
                self.advance(events.Told(name, Finished(session=node.plan.session, run=RUN)))

    def admit(self, name: str, hello: Hello) -> None:
        is_present = name in self.state.present
        if self.membership.is_stale(name, hello, present=is_present):
            return
        assert self.membership.find_objection(name, hello, RUN, present=is_present) is None
        newest = max(
            (round_ for round_, nodes in self.ledger.counted.items() if name in nodes), default=0
        )
        is_in_totals = newest == SPEC.rounds
        self.advance(
            events.Joined(name, hello, self.membership.session(name), newest, is_in_totals)
        )

    def advance(self, event: events.Event) -> None:
        self.state, effects = coordinator_machine.advance(self.state, event)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: effects.Effect) -> None:
        ledger = self.ledger
        match effect:
            case effects.Admit(name, hello, contributed):
                if ledger.identities.get(name) != hello.identity:
                    ledger.identities[name] = hello.identity
                    ledger.finished.discard(name)
                self.membership.admit(name, hello)
                welcome = Welcome(
                    session=hello.session, server=self.session, contributed=contributed
                )
                self.send(name, message=welcome)
            case effects.Open(round_):
                ledger.round = round_
                self.publish()
            case effects.Close():
                ledger.broadcast, self.uploads = aggregate(ledger.broadcast), {}
            case effects.Finish():
                ledger.round += 1
                self.publish()
            case effects.Publish():
                self.publish()
            case effects.Collect(name, message):
                self.uploads[name] = message
            case effects.Accept(name, accepted):
                self.send(name, message=accepted)
            case effects.RecordFinished(name):
                ledger.finished.add(name)
            case effects.Refuse(error):
                raise AssertionError(f"an honest node is refused: {error}")
            case effects.Reject(_, refusal):
                raise AssertionError(f"an honest node is not let in: {refusal.reason}")
            case _:
                pass

    def fetch(self, node: NodeModel) -> None:
        """A node's contribution arrives, if it is on its disk."""
        message = self.uploads[node.plan.name]
        assert message.blob is not None
        if not node.disk.get(message.blob.digest):
            node.advance(Damaged(message.blob.digest))
            return
        del self.uploads[node.plan.name]
        expected = make_contribution(self.ledger.broadcast, node.plan.name)
        assert message.blob.digest == expected.digest, "it was trained from another broadcast"
        self.ledger.counted.setdefault(message.round, {})[node.plan.name] = message.blob.digest
        self.advance(events.Contributed(node.plan.name, message))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        heard = [name for name in NAMES if self.membership.session(name) is not None]
        self.advance(events.Tick(self.now, self.ledger.finished, heard))


def _fields(message: AnyMessage) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def hello_of(node: NodeModel, round_: int) -> Hello:
    identity = node.plan.name.encode().hex()[:16]
    return Hello(
        session=node.plan.session,
        run=RUN,
        software="1",
        identity=identity,
        incarnation=node.session,
        round=round_,
    )


class Federations(RuleBasedStateMachine):
    """Two nodes and a coordinator; each may be killed, or restored from a copy of before."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinator, self.now = CoordinatorModel(), 0.0
        plans = [session_state.Plan(SPEC, name, "0" * 16, FOLDER) for name in NAMES]
        self.nodes = {
            plan.name: NodeModel(plan, first_session=1000 * index)
            for index, plan in enumerate(plans)
        }
        for node in self.nodes.values():
            node.advance(node_events.Connected())
        self.backup = self.coordinator.ledger.copy()

    # What goes well

    @rule(name=st.sampled_from(NAMES))
    def messages_arrive(self, name: str) -> None:
        node, coordinator = self.nodes[name], self.coordinator
        while node.outbox:
            coordinator.hear(node, node.outbox.popleft())
        if node.state.result:
            return  # its process has ended
        self.now += 1.5
        self.tell(node, node_events.Tick(self.now))
        while coordinator.down[name]:
            self.tell(node, node_events.Received(coordinator.down[name].popleft()))

    @rule(name=st.sampled_from(NAMES))
    def a_blob_arrives(self, name: str) -> None:
        node = self.nodes[name]
        if (
            node.fetching is not None
            and node.fetching.digest == self.coordinator.ledger.broadcast.digest
        ):
            node.arrive()
        if name in self.coordinator.uploads:
            self.coordinator.fetch(node)

    @rule(name=st.sampled_from(NAMES))
    def a_stage_ends(self, name: str) -> None:
        if self.nodes[name].job:
            self.nodes[name].finish_stage()

    @rule()
    def all_goes_well_for_a_while(self) -> None:
        for name in NAMES:
            self.messages_arrive(name)
            self.a_blob_arrives(name)
            self.a_stage_ends(name)
        self.coordinator.tick(0.2)

    # What does not

    @precondition(lambda self: any(self.coordinator.down.values()))
    @rule(name=st.sampled_from(NAMES))
    def what_was_under_way_is_lost(self, name: str) -> None:
        self.coordinator.down[name].clear()
        self.nodes[name].outbox.clear()
        self.nodes[name].advance(node_events.Connected())

    @rule(name=st.sampled_from(NAMES), loses_its_state=st.booleans(), is_noticed=st.booleans())
    def a_node_is_killed(self, name: str, loses_its_state: bool, is_noticed: bool) -> None:
        node = self.nodes[name]
        # with what it has contributed damaged, too, it is not let in: its images would count twice
        node.restart(loses_its_state=loses_its_state and all(node.disk.values()))
        self.nodes[name].advance(node_events.Connected())
        if is_noticed:
            self.coordinator.advance(events.Left(name, name in self.coordinator.ledger.finished))

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def a_blob_is_damaged(self, name: str, data: st.DataObject) -> None:
        node = self.nodes[name]
        in_use = node.job.manifest.digest if node.job else ""
        spoilt = sorted(node.disk.keys() - {in_use})
        if spoilt and node.lost is None:
            node.disk[data.draw(st.sampled_from(spoilt))] = False

    @rule()
    def the_coordinator_is_killed(self) -> None:
        self.coordinator.start()

    @rule()
    def the_coordinator_s_folder_is_copied(self) -> None:
        self.backup = self.coordinator.ledger.copy()

    @rule()
    def the_coordinator_is_restored_from_that_copy(self) -> None:
        self.coordinator.ledger = self.backup.copy()
        self.coordinator.start()

    # What is promised

    def tell(self, node: NodeModel, event: node_events.Event) -> None:
        for effect in node.advance(event):
            if isinstance(effect, node_events.CheckRun):
                raise AssertionError(f"it looks for another run: {effect.refusal}")

    @invariant()
    def a_node_has_no_error(self) -> None:
        assert [str(node.error) for node in self.nodes.values() if node.error] == []

    def teardown(self) -> None:
        """When the faults end, all have their model,
        of the result that a run without faults has.
        """
        for _ in range(60):
            if self.is_at_its_end():
                break
            if self.coordinator.state.is_over:
                self.coordinator.start()  # somebody still wants the result
            for node in self.nodes.values():
                if node.state.result and not self.coordinator.state.is_finished:
                    # as a coordinator asks for that goes on from a copy
                    node.restart(loses_its_state=False)
                    node.advance(node_events.Connected())
            self.coordinator.call_roll()
            self.all_goes_well_for_a_while()
        assert self.is_at_its_end()
        assert self.coordinator.ledger.broadcast.digest == RESULT.digest

    def is_at_its_end(self) -> bool:
        return self.coordinator.state.is_finished and all(
            node.state.result for node in self.nodes.values()
        )


Federations.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_federations_keep_their_promises = Federations.TestCase
