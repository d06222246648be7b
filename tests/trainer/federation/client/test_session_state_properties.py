"""A node's session under random faults, beside a model of its coordinator:
it always comes to its end.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker_config.protocol.messages import Accepted, AnyMessage, Presence, RoundState, Welcome
from broker_config.transfer.blob_transfer import Damaged
from tests.support.node_model import (
    FOLDER,
    NAME,
    RUN,
    SESSION,
    NodeModel,
    make_broadcast,
    make_delta,
    make_spec,
)
from trainer.federation.client.session_events import Announce, Connected, Received, Send, Tick
from trainer.federation.client.session_state import Plan

SPEC = make_spec(rounds=4)


class Coordinator:
    """What the node sees of a coordinator whose other nodes are never missing."""

    def __init__(self) -> None:
        self.round, self.counted, self.process = 1, set[int](), 0
        self.has_been_over = False
        self.down: deque[AnyMessage] = deque()
        self.restart()

    def restart(self, round_: int | None = None) -> None:
        """Another process begins, from what is on its disk or from an older copy of that."""
        self.process += 1
        self.server, self.welcomed, self.begun = f"{self.process:016x}", "", round_ or self.round
        if round_ is not None:
            self.round, self.counted = round_, {each for each in self.counted if each < round_}
        self.down += [Presence(session=self.server, online=True), self.state]

    @property
    def is_over(self) -> bool:
        return self.round > SPEC.rounds

    @property
    def state(self) -> RoundState:
        """As it is retained."""
        return RoundState(
            run=RUN,
            round=min(self.round, SPEC.rounds),
            status="finished" if self.is_over else "open",
            broadcast=make_broadcast(SPEC, self.round),
            server=self.server,
            delta=make_delta(SPEC, self.round)
            if self.round > self.begun or self.round == 1
            else None,
        )

    def close_round(self) -> None:
        self.round += 1
        self.has_been_over |= self.is_over
        self.down.append(self.state)

    def hear(self, message: object, node: NodeModel) -> None:
        match message:
            case Announce():
                self.welcomed = node.plan.session
                welcome = Welcome(
                    session=self.welcomed,
                    server=self.server,
                    contributed=max(self.counted, default=0),
                )
                self.down += [welcome, self.state]
            case Send(contribution) if contribution.session == self.welcomed:
                round_, blob = contribution.round, contribution.blob
                if round_ > self.round and contribution.server != self.server:
                    return  # it did not know
                assert round_ <= self.round, "it contributes to a round that is not open"
                if round_ == self.round and blob and not node.disk.get(blob.digest):
                    node.advance(Damaged(blob.digest))
                    return
                is_due = round_ == self.round and not self.is_over
                if is_due:
                    self.counted.add(round_)
                self.down.append(
                    Accepted(
                        session=self.welcomed, run=RUN, round=round_, counted=round_ in self.counted
                    )
                )
                if is_due:
                    self.close_round()


class Sessions(RuleBasedStateMachine):
    """The node's shell and its coordinator, with a network between them that loses,
    repeats and delays.
    """

    @initialize(sends=st.booleans(), deploys_final=st.booleans(), deltas_fit=st.booleans())
    def begin(self, sends: bool, deploys_final: bool, deltas_fit: bool) -> None:
        plan = Plan(
            SPEC, NAME, SESSION, FOLDER, deploys_final=deploys_final, needs_final=deploys_final
        )
        self.node, self.coordinator, self.now = NodeModel(plan, sends=sends), Coordinator(), 0.0
        self.node.deltas_fit = deltas_fit
        self.node.advance(Connected())

    # The network

    @precondition(lambda self: self.coordinator.down)
    @rule(data=st.data(), stays=st.booleans())
    def node_hears(self, data: st.DataObject, stays: bool) -> None:
        """Whatever is under way, in any order, once or again."""
        index = data.draw(st.integers(0, len(self.coordinator.down) - 1))
        message = self.coordinator.down[index]
        if not stays:
            del self.coordinator.down[index]
        self.node.advance(Received(message))

    @precondition(lambda self: self.coordinator.down)
    @rule()
    def a_message_to_the_node_is_lost(self) -> None:
        self.coordinator.down.popleft()

    @precondition(lambda self: self.node.outbox)
    @rule(stays=st.booleans())
    def coordinator_hears(self, stays: bool) -> None:
        """In order, once or again."""
        message = self.node.outbox[0] if stays else self.node.outbox.popleft()
        self.coordinator.hear(message, self.node)

    @precondition(lambda self: self.node.outbox)
    @rule()
    def a_message_of_the_node_is_lost(self) -> None:
        self.node.outbox.popleft()

    @rule()
    def node_reconnects(self) -> None:
        self.node.advance(Connected())

    @rule(seconds=st.sampled_from((0.2, 1.5, 30.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.node.advance(Tick(self.now))

    @rule()
    def nothing_goes_wrong(self) -> None:
        """All that is under way arrives."""
        self.time_passes(1.5)
        while self.node.outbox:
            self.coordinator.hear(self.node.outbox.popleft(), self.node)
        while self.coordinator.down and not self.node.error:
            self.node.advance(Received(self.coordinator.down.popleft()))
        if self.is_served():
            self.node.arrive()

    # The node's disk and training thread

    @precondition(lambda self: self.is_served())
    @rule()
    def a_blob_arrives(self) -> None:
        self.node.arrive()

    @precondition(lambda self: self.node.job and self.node.job.stage)
    @rule()
    def a_stage_ends(self) -> None:
        self.node.finish_stage()

    @precondition(lambda self: self.node.disk)
    @rule(data=st.data())
    def a_blob_is_damaged(self, data: st.DataObject) -> None:
        """Not while a stage reads it: that would end the process, with a remedy."""
        in_use = self.node.job.manifest.digest if self.node.job else ""
        digest = data.draw(st.sampled_from(sorted(self.node.disk)))
        if digest != in_use:
            self.node.disk[digest] = False

    @rule(loses_its_state=st.booleans())
    def node_is_killed(self, loses_its_state: bool) -> None:
        self.node.restart(loses_its_state=loses_its_state)
        self.now = 0.0
        self.node.advance(Connected())

    # The coordinator

    @rule()
    def coordinator_restarts(self) -> None:
        self.coordinator.restart()

    @rule(data=st.data())
    def coordinator_is_restored_from_an_older_copy(self, data: st.DataObject) -> None:
        self.coordinator.restart(data.draw(st.integers(1, self.coordinator.round)))

    @precondition(lambda self: not self.coordinator.is_over)
    @rule()
    def a_deadline_closes_the_round_without_the_node(self) -> None:
        self.coordinator.close_round()

    # What is promised

    def is_served(self) -> bool:
        """Whether the blob that the node fetches is one that the coordinator still has."""
        state = self.coordinator.state
        return self.node.fetching in [state.broadcast, *([state.delta.blob] if state.delta else [])]

    @invariant()
    def it_knows_what_is_on_its_disk(self) -> None:
        assert self.node.state.progress == self.node.durable

    @invariant()
    def it_is_busy_if_and_only_if_it_has_a_job(self) -> None:
        assert self.node.state.is_busy == (self.node.job is not None)

    @invariant()
    def it_has_found_no_fault_that_it_cannot_mend(self) -> None:
        """But one: a run that is over before the node has trained a round."""
        assert self.node.error is None or (
            self.coordinator.has_been_over and self.node.state.progress is None
        )

    def teardown(self) -> None:
        """When the faults end, the run does: with a model,
        unless it was over before the node had trained.
        """
        if not hasattr(self, "node"):
            return
        for _ in range(40):
            if not self.is_at_its_end():
                self.coordinator.down.append(Presence(session=self.coordinator.server, online=True))
                self.nothing_goes_wrong()
                if self.node.job:
                    self.node.finish_stage()
        assert self.is_at_its_end()
        self.it_has_found_no_fault_that_it_cannot_mend()

    def is_at_its_end(self) -> bool:
        return self.node.state.result is not None or self.node.error is not None


Sessions.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
test_sessions_keep_their_promises = Sessions.TestCase
