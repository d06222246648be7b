"""The coordinator's process: MQTT and clock around the state machine of rounds and the durable ledger."""

import contextlib
import queue
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from broker_config.mqtt.client import Connected, Delivery, Disconnected, Endpoint, TakenOver, read_retained
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode, decode_any, encode
from broker_config.protocol.errors import BrokerError, EdgeNodeError, PeerError, UsageError, abbreviate
from broker_config.protocol.messages import (
    Accepted,
    AnyMessage,
    Contribution,
    Finished,
    Hello,
    Manifest,
    Presence,
    Refusal,
    RoundState,
    Spec,
    Telemetry,
)
from broker_config.protocol.round_contents import is_statistics_round
from broker_config.transfer.blob_transfer import BlobTransfer, Damaged, Fetched, FetchFailed
from trainer import progress
from trainer.federation.presence import await_room, check_no_server
from trainer.federation.server import round_state as rounds
from trainer.federation.server.connection import ServerConnection, publish_retained
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.membership import GRACE, HELLO_COST, Membership
from trainer.federation.server.pending_uploads import PendingUploads
from trainer.federation.server.robust_rules import RULES
from trainer.federation.server.status import StatusTracker, round_message
from trainer.models.named_tensors import Arrays

DEFAULT_CHUNK = 256 * 1024
LINGER = 60.0  # seconds for absent nodes to come back and fetch the result
_INBOX = 512  # events, of up to 100 kB; beyond that the broker keeps them, or drops what has QoS 0
_TICK = 0.2  # seconds


class Outcome(NamedTuple):
    """Result of a finished federation."""

    broadcast: Arrays  # after the last round
    bytes_up: int
    bytes_down: int
    seconds: float


def coordinate(
    ledger: Ledger,
    spec: Spec,
    broadcast: Arrays,
    endpoint: Endpoint,
    report: progress.Report,
    *,
    new: bool = False,
    chunk_size: int = DEFAULT_CHUNK,
    linger: float = LINGER,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome | None:
    """Run a federation from where its ledger stands to its end; None when `stop` said to suspend it.

    Args:
        ledger: of this run, or empty.
        spec: as it is wanted; a run that has begun keeps its own.
        broadcast: that a new run starts from.
        endpoint: the broker.
        report: shows progress.
        new: begin another run.
        chunk_size: bytes of a message; a broker's own limit is honoured anyway.
        linger: seconds that the result is kept ready for nodes that are away when the last round closes; and, where
            the run had finished before and newcomers can make a model of its result, for these. And that a coordinator
            whose state is an older copy waits for nodes that have finished the run.
        stop: asked often.

    Raises:
        BrokerError: the broker cannot be reached.
        UsageError: the federation is already coordinated on this broker, or the ledger's run has other settings.
        EdgeNodeError: the disk fails. Started again with the same ledger, the federation goes on.
    """
    if not await_room(lambda: check_no_server(endpoint, spec.federation), report, stop):
        return None
    ledger.begin_or_continue(spec, broadcast, new=new)
    coordinator = _Coordinator(ledger, endpoint, report, chunk_size, linger, has_ended=_has_ended(ledger, endpoint))
    try:
        return coordinator.run(stop)
    finally:
        coordinator.close()


def _has_ended(ledger: Ledger, endpoint: Endpoint) -> bool:
    """Whether the broker retains that the ledger's open run has finished: then the ledger is an older copy."""
    run = ledger.run
    if run is None or not run.round or run.outcome is not None:
        return False
    topic = topics.round_state(run.spec.federation)
    try:
        state = decode(read_retained(endpoint, [topic], wait=1.0).get(topic, b""), RoundState)
    except (DecodeError, BrokerError):
        return False
    return (state.run, state.status) == (run.spec.run, "finished")


def abort(ledger: Ledger, endpoint: Endpoint, reason: str) -> None:
    """End a run early; its nodes learn of it now, or when they next connect.

    Raises:
        BrokerError: the broker cannot be reached.
        UsageError: the run has ended.
    """
    assert ledger.run is not None
    spec = ledger.run.spec
    if ledger.run.outcome is not None:
        raise UsageError(
            f"the run of federation {spec.federation!r} in {ledger.folder} was {ledger.run.outcome} before",
            "there is nothing to abort; begin another run with edge-node coordinate --new",
        )
    state = RoundState(run=spec.run, round=min(ledger.run.round, spec.rounds), status="aborted", reason=reason)
    if not publish_retained(endpoint, {topics.round_state(spec.federation): encode(state)}):
        raise EdgeNodeError(f"{endpoint} did not confirm within 10 s that it tells the nodes", "try again")
    ledger.abort()


class _Coordinator:
    def __init__(
        self,
        ledger: Ledger,
        endpoint: Endpoint,
        report: progress.Report,
        chunk_size: int,
        linger: float,
        *,
        has_ended: bool,
    ):
        self._has_ended = has_ended  # for nodes that have gone, and so far have not come back
        self._ledger, self._signer, self._linger, self._preferred_chunk = ledger, endpoint.signer, linger, chunk_size
        session = secrets.token_hex(8)
        members, member_list = (
            ledger.run.members if ledger.run else {},
            endpoint.signer.members if endpoint.signer else None,
        )
        gone = {node for node in members if member_list and node not in member_list.nodes}
        self._state = ledger.resume(gone)
        self._spec = spec = ledger.spec
        self._tracker = StatusTracker(spec, member_list=member_list)
        self._report = report = self._tracker.observing(report)
        for total in ledger.contribution_totals():
            self._tracker.restore(*total)
        self._excluded = gone  # and those that were refused: they are not waited for at the end
        self._started = self._opened = self._joined = time.monotonic()  # joined: when a node did last
        self._lingering_since: float | None = None  # when the last node left of those that still want the result
        self._newcomers: set[str] = set()  # nodes that are fetching the result without having been in the run
        self._serves_newcomers = bool(spec.statistics) and self._state.status is rounds.Status.FINISHED

        self._inbox: queue.Queue[object] = queue.Queue(_INBOX)
        self._membership = Membership(spec.nodes, ledger.identities)
        self._connection = ServerConnection(
            endpoint, spec, session, self._inbox, self, self._membership, report,
            persistent=True,
        )  # fmt: skip
        self._transfer = BlobTransfer(
            endpoint, spec.federation, topics.COORDINATOR, ledger.store, self._inbox,
            may_ask=lambda node: self._membership.session(node) is not None,
        )  # fmt: skip
        self._uploads = PendingUploads(self._transfer)
        self._rounds = progress.RoundReporter(
            report, lambda: (self._transfer.bytes_received, self._transfer.bytes_sent)
        )
        self._activities = progress.ActivityReporter(report)

    def run(self, stop: Callable[[], bool]) -> Outcome | None:
        spec = self._spec
        if not all(await_room(each, self._report, stop) for each in (self._connection.open, self._transfer.start)):
            return None
        self._handle(self._inbox.get())  # Connected: what is retained of an earlier run is replaced
        self._connection.mqtt.flush(5)
        self._report(progress.Gathering(federation=spec.federation, run=spec.run, nodes=spec.nodes, rounds=spec.rounds))
        self._report_start()
        self._advance(rounds.Resumed())
        while not self._is_done():
            if stop():
                return None
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=_TICK))
            self._check_timers()
            for blob in self._uploads:
                self._report_activity(blob.node, "sending", blob)
            self._publish_status()
        up, down = self._transfer.bytes_received, self._transfer.bytes_sent
        seconds = time.monotonic() - self._started
        self._report(progress.FederationFinished(rounds=spec.rounds, bytes_up=up, bytes_down=down, seconds=seconds))
        return Outcome(self._ledger.broadcast, up, down, seconds)

    def close(self) -> None:
        self._publish_status(anyway=True)
        self._transfer.close()
        self._connection.close()

    @property
    def round(self) -> int:
        return self._state.round

    @property
    def present(self) -> frozenset[str]:
        return self._state.present | self._newcomers

    def _report_start(self) -> None:
        """Report how contributions are aggregated, and where an earlier process of this coordinator stopped."""
        if (rule := self._spec.aggregation).rule in RULES:
            against = f", against {rule.liars} liar(s)" if rule.liars else ""
            self._note(f"contributions become one model by {rule.rule}, unweighted{against}")
        if self._state.status is rounds.Status.GATHERING:
            return
        if self._state.status is rounds.Status.FINISHED:
            self._note("this run had finished before; --new begins another one")
        else:
            self._note(f"going on with run {self._spec.run} in round {self._state.round}")
            self._rounds.open(self._state.round, sums=self._sums(self._state.round))
            if damaged := self._ledger.damaged - self._excluded:
                names, folder = ", ".join(sorted(damaged)), self._ledger.store.folder
                self._note(f"what {names} contributed was damaged in {folder}: it is fetched again")
            if away := self._state.missing - self._excluded:
                names = ", ".join(sorted(away))
                if sum(map(self._state.takes_part, self._state.members)) > self._state.plan.quorum:
                    self._note(f"{names}: {GRACE:.0f} s to come back, or the round may close without")
                else:
                    self._note(f"waiting for {names} to come back: round {self._state.round} needs all of its nodes")
        if self._excluded:
            names, quorum = ", ".join(sorted(self._excluded)), self._state.plan.quorum
            self._note(f"no member any more: {names}; the others go on, {quorum} close a round")

    def _is_done(self) -> bool:
        """Whether the last round is closed and no node is expected any more that has yet to fetch the result."""
        if self._state.status is not rounds.Status.FINISHED:
            return False
        waiting = self._ledger.identities.keys() - self._ledger.finished - self._excluded
        if waiting & self._state.present or self._newcomers:
            self._lingering_since = None
            return False
        if not waiting and not self._serves_newcomers:
            return True
        now = time.monotonic()
        if self._lingering_since is None:
            self._lingering_since = now
            names, command = ", ".join(sorted(waiting)) or "newcomers", "edge-node coordinate"
            if self._membership.is_first_report("lingering", names):
                self._note(
                    f"waiting {self._linger:g} s for {names} to fetch the result; {command} serves it again later"
                )
        return now - self._lingering_since >= self._linger

    def _check_return(self) -> None:
        """Raise EdgeNodeError if this run has finished before, and nodes whose part is lacking do not come back."""
        state = self._state
        gone = {node for node in state.members - state.contributed if self._membership.session(node) is None}
        if len(state.members - gone) >= state.plan.quorum:
            self._has_ended = False
        elif time.monotonic() - self._joined >= self._linger:
            names, folder = ", ".join(sorted(gone)), self._ledger.folder
            raise EdgeNodeError(
                f"this run had finished, {folder} is in round {state.round}: it is an older copy, and {names} did not "
                f"come back within {self._linger:g} s",
                "put the newer folder back; or start this again, which then waits for them, and have each join again "
                "with its own --state: they go back to this round. For another run: edge-node abort, then --new",
            )

    def _check_timers(self) -> None:
        if self._has_ended:
            self._check_return()
        self._connection.drop_silent_members()
        self._connection.repeat_roll_call()
        if self._state.status is rounds.Status.OPEN:
            age, spec, round_ = time.monotonic() - self._opened, self._spec, self._state.round
            if spec.min_wait and age >= spec.min_wait and not self._state.waited:
                self._advance(rounds.Waited(round_))
            if spec.deadline and age >= spec.deadline and not self._state.expired:
                self._advance(rounds.Expired(round_))

    # Messages and blobs

    def _handle(self, event: object) -> None:
        match event:
            case Delivery() | Connected() | Disconnected() | TakenOver():
                self._connection.handle(event)
            case Fetched(manifest):
                self._handle_upload(manifest)
            case Damaged(digest):
                if digest == self._ledger.broadcast_blob.digest:
                    self._serve_broadcast()
            case FetchFailed(manifest) if manifest not in self._uploads:
                pass  # it is not wanted any more
            case FetchFailed(manifest, error):
                if ours := event.ours("then start the coordinator again: it goes on where it was"):
                    raise ours from error
                self._connection.refuse(PeerError(manifest.node, f"its contribution did not arrive: {error}"))

    def process(self, node: str, delivery: Delivery) -> None:
        """Act on a node's message. PeerError or DecodeError if it breaks the protocol."""
        if not topics.is_name(node):
            raise PeerError(abbreviate(node, 64), "no node can have this name")
        if self._connection.is_flooding(node):
            return
        if delivery.topic == topics.up(self._spec.federation, node):
            self._tracker.record_message(node)
        self._dispatch(node, decode_any(delivery.payload))

    def _dispatch(self, node: str, message: AnyMessage) -> None:
        session = self._membership.session(node)
        match message:
            case Presence(online=False):
                if message.session == session:
                    self.mark_lost(node)
            case Presence():
                pass
            case Hello():
                if message.session == session or not self._connection.is_flooding(node, HELLO_COST):
                    self._admit(node, message)
            case Finished():
                over = message.run == self._spec.run and self._state.status is rounds.Status.FINISHED
                self._newcomers.discard(node)
                if over and node in self._ledger.identities:
                    self._ledger.finish(node)  # whatever its session was: the model is there
            case Contribution() | Telemetry() if message.run != self._spec.run or message.session != session:
                pass  # of an earlier run or session: without effect
            case Contribution():
                self._handle_contribution(node, message)
            case Telemetry():
                known = message.round <= self._state.round
                if known and self._membership.is_first_report("telemetry", node, message.round):
                    self._report(progress.Measured(node=node, round=message.round, metrics=message.metrics))
            case _:
                raise PeerError(node, f"a node does not send {type(message).__name__}")

    def _admit(self, node: str, hello: Hello) -> None:
        over = self._state.status is rounds.Status.FINISHED and bool(self._spec.statistics)
        newcomer = over and node not in self._ledger.identities
        if not self._connection.may_join(node, hello, newcomer=newcomer):
            return
        if newcomer:
            self._welcome_newcomer(node, hello)
            return
        if over and self._has_lost_its_sums(node, hello):
            return
        is_new = node not in self._state.present or self._membership.session(node) is None
        self._ledger.admit(node, hello.identity)
        self._excluded.discard(node)
        contributed = self._ledger.newest_contribution(node)
        if hello.session != self._membership.session(node):  # else it may be a Hello of before, said again
            self._note_older_copy(node, hello.round, contributed)
        self._connection.welcome(node, hello, contributed)
        if is_new:
            self._joined = time.monotonic()
            self._report(progress.NodeJoined(node=node))
            self._advance(rounds.Joined(node))
            if node in self._state.missing and self._state.status is rounds.Status.OPEN:
                self._report_activity(node, "training")

    def _note_older_copy(self, node: str, theirs: int, contributed: int) -> None:
        """Report once that a node's state folder, or ours, is behind what the other one has seen of it."""
        if theirs > self._state.round and self._membership.is_first_report("ahead", self._state.round):
            self._note(
                f"{node} has been in round {theirs}, and {self._ledger.folder} is in round {self._state.round}: it is "
                "an older copy, and the nodes go back with it; put the newer folder back if that is not intended"
            )
        if 0 < theirs < contributed and self._membership.is_first_report("behind", node, theirs):
            self._note(
                f"{node} has contributed to round {contributed}, and its state folder knows of round {theirs}: it is "
                "an older copy, from which the node goes on"
            )

    def _welcome_newcomer(self, node: str, hello: Hello) -> None:
        """Let a node have the result that was not in the run: it takes no place, and nobody waits for its return."""
        if self._membership.is_first_report("newcomer", node):
            self._note(f"{node} was not in this run, and takes its result")
        self._newcomers.add(node)
        self._connection.welcome(node, hello)

    def _has_lost_its_sums(self, node: str, hello: Hello) -> bool:
        """Whether the totals hold what this node has forgotten; then it is told so: it would count its images twice.

        Its folder is another one, or an older copy; one that only lacks its identity knows its sums.
        """
        if hello.round >= self._spec.rounds or not self._ledger.has_counted(node, self._spec.rounds):
            return False
        refusal = Refusal(
            session=hello.session,
            reason=f"the totals hold statistics of {node!r} that its state folder does not know",
            remedy="join with the newest folder (--state), or ask for a new run: these images would count twice",
        )
        self._connection.reject(node, refusal)
        return True

    def mark_lost(self, node: str) -> None:
        """A node's connection has ended."""
        if node in self._state.present and node not in self._ledger.finished:
            self._report(progress.NodeLost(node=node, round=self._state.round))
        self._leave(node)

    def exclude(self, node: str) -> None:
        """A node was refused."""
        self._uploads.cancel(node)
        self._excluded.add(node)
        self._leave(node)

    def _leave(self, node: str) -> None:
        self._activities.reset(node)
        self._newcomers.discard(node)
        self._membership.confirm(node)
        self._advance(rounds.Left(node))

    # Contributions

    def _handle_contribution(self, node: str, message: Contribution) -> None:
        match self._state.admission(node, message.round):
            case rounds.Admission.COUNTED:
                self._accept(node, message)  # its effect is on disk
            case rounds.Admission.LATE:
                self._answer_late(node, message)
            case rounds.Admission.EARLY:
                raise PeerError(node, f"round {message.round} is not open", message.round)
            case rounds.Admission.NOT_DRAWN:
                raise PeerError(node, f"it was not drawn for round {message.round}", message.round)
            case rounds.Admission.DUE:
                self._ledger.validate(node, message)
                if message.blob is None:
                    self._add_contribution(node, message)
                else:
                    self._uploads.fetch(message)

    def _answer_late(self, node: str, message: Contribution) -> None:
        """A contribution to a closed round: counted before the round was closed, or too late."""
        if self._ledger.has_counted(node, message.round):
            self._accept(node, message)
            return
        if self._membership.is_first_report("late", node, message.round):
            self._report(progress.Late(node=node, round=message.round))
        self._accept(node, message, f"round {message.round} was closed before this contribution came")

    def _handle_upload(self, manifest: Manifest) -> None:
        message = self._uploads.pop(manifest)
        if message is not None:
            try:
                self._add_contribution(manifest.node, message)
            except PeerError as error:
                self._connection.refuse(error)
        if all(each.digest != manifest.digest for each in self._uploads):  # else a node could fill the disk
            self._ledger.discard(manifest.digest)

    def _add_contribution(self, node: str, message: Contribution) -> None:
        """Validate a contribution whose blob is here, write it down, sum it, and accept it."""
        self._ledger.add_contribution(node, message)
        size = message.blob.size if message.blob else 0
        self._accept(node, message)
        self._report(progress.Contribution(node=node, round=message.round, weight=message.weight, bytes=size))
        self._report_activity(node, "waiting")
        self._advance(rounds.Contributed(node))

    def _accept(self, node: str, message: Contribution, not_counted: str = "") -> None:
        """Tell a node that it need not send this contribution again, and why it was not counted."""
        accepted = Accepted(
            session=message.session, run=message.run, round=message.round, counted=not not_counted, reason=not_counted
        )
        self._connection.send(node, accepted)

    # Rounds

    def _advance(self, event: rounds.Event) -> None:
        self._state, effects = rounds.advance(self._state, event)
        for effect in effects:
            match effect:
                case rounds.Open(round_, drawn):
                    self._open_round(round_, drawn)
                case rounds.Close(_, contributors):
                    self._close_round(contributors)
                case rounds.Finish():
                    self._ledger.conclude()
                    self._publish_round()
                case rounds.Pause(round_):
                    absent = sorted(self._state.members - self._state.present - self._state.contributed)
                    self._report(progress.Paused(round=round_, waiting_for=absent))
                    self._publish_round()
                case rounds.Resume(round_):
                    self._note(f"enough nodes are there again: round {round_} goes on")
                    self._publish_round()

    def _open_round(self, round_: int, drawn: frozenset[str]) -> None:
        self._ledger.open_round(round_, drawn)
        self._opened = time.monotonic()
        self._publish_round()
        self._rounds.open(round_, sums=self._sums(round_))
        for node in sorted(self._state.missing):
            self._report_activity(node, "training")

    def _sums(self, round_: int) -> bool:
        """Whether nodes contribute statistics to this round, instead of training."""
        return is_statistics_round(self._spec, round_)

    def _close_round(self, contributors: frozenset[str]) -> None:
        self._uploads.cancel_all()
        self._transfer.withdraw(self._ledger.broadcast_blob.digest)
        missing = sorted(self._ledger.absent)
        limited = self._ledger.aggregate()
        self._rounds.close(sorted(contributors), missing, limited)

    # Reports

    def publish_state(self) -> None:
        """Publish the round and the nodes' status."""
        self._publish_round()
        self._publish_status(anyway=True)

    def _publish_round(self) -> None:
        """Publish where the federation stands, and serve the blob that the round starts from."""
        blob, chunk_size = self._ledger.broadcast_blob, self._serve_broadcast()
        manifest = Manifest(
            federation=self._spec.federation,
            run=self._spec.run,
            round=self._state.round,
            node=topics.COORDINATOR,
            digest=blob.digest,
            size=blob.size,
            chunk_size=chunk_size,
        )
        if self._signer:
            manifest = msgspec.structs.replace(manifest, signature=self._signer.sign_broadcast(manifest))
        self._connection.publish_round(round_message(self._spec, self._state, manifest))

    def _serve_broadcast(self) -> int:
        """Serve the broadcast, written anew if it was changed on the disk, and return the bytes of its chunks."""
        digest, chunk_size = self._ledger.broadcast_blob.digest, self._transfer.chunk_size(self._preferred_chunk)
        if not self._transfer.offer(digest, chunk_size):
            path = self._ledger.write_broadcast_again()
            self._note(f"{path} was changed or removed: it is written again from memory; check this disk")
            self._transfer.offer(digest, chunk_size)
        return chunk_size

    def _publish_status(self, *, anyway: bool = False) -> None:
        overview = self._tracker.next_overview(self._state, self._ledger.finished, anyway=anyway)
        if overview:
            self._connection.publish_status(overview)

    def _report_activity(self, node: str, what: progress.ActivityKind, blob: Manifest | None = None) -> None:
        """Report what a node does, as far as the coordinator can know."""
        done, total = (self._transfer.received(blob.digest), blob.size) if blob else (0, 0)
        self._activities.report(
            progress.Activity(node=node, round=self._state.round, what=what, done=done, total=total)
        )

    def _note(self, text: str) -> None:
        self._report(progress.Note(text=text))
