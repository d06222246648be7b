"""The coordinator: MQTT and clock around the round's state machine (`round`) and what is on disk (`ledger`)."""

import contextlib
import queue
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from broker_config.mqtt.client import Connected, Delivery, Disconnected, Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode, decode_any
from broker_config.protocol.errors import EdgeNodeError, PeerError, UsageError, brief
from broker_config.protocol.messages import (
    Accepted,
    AnyMessage,
    Contribution,
    Finished,
    Hello,
    Manifest,
    Presence,
    Refusal,
    Spec,
    Telemetry,
    Welcome,
)
from broker_config.transfer.blob_transfer import BlobTransfer, Fetched, FetchFailed
from trainer import progress
from trainer.federation.server import round_state as rounds
from trainer.federation.server.announcements import Herald, check_unclaimed, claimed, say_aborted
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.membership import GRACE, HELLO_COST, MAX_MESSAGES, WINDOW, Membership
from trainer.federation.server.status import StatusTracker
from trainer.federation.server.uploads import PendingUploads
from trainer.models.named_tensors import Arrays

DEFAULT_CHUNK = 256 * 1024
LINGER = 60.0  # seconds for absent nodes to come back and fetch the result
_INBOX = 512  # events, of up to 100 kB; beyond that the broker keeps them, or drops what has QoS 0
_TICK = 0.2  # seconds


class Outcome(NamedTuple):
    """What a finished federation leaves."""

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
        linger: seconds that the result is kept ready for nodes that are away when the last round closes.
        stop: asked often.

    Raises:
        BrokerError: the broker cannot be reached.
        UsageError: the federation is already coordinated on this broker, or the ledger's run has other settings.
        EdgeNodeError: the disk fails. Started again with the same ledger, the federation goes on.
    """
    check_unclaimed(endpoint, spec.federation, ledger.run.sessions if ledger.run else ())
    ledger.begin_or_continue(spec, broadcast, new=new)
    coordinator = _Coordinator(ledger, endpoint, report, chunk_size, linger)
    try:
        return coordinator.run(stop)
    finally:
        coordinator.close()


def abort(ledger: Ledger, endpoint: Endpoint, reason: str) -> None:
    """End a run early, and tell its nodes, now or when they look.

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
    if not say_aborted(endpoint, spec, min(ledger.run.round, spec.rounds), reason):
        raise EdgeNodeError(f"{endpoint} did not confirm within 10 s that it tells the nodes", "try again")
    ledger.abort()


class _Coordinator:
    def __init__(self, ledger: Ledger, endpoint: Endpoint, report: progress.Report, chunk_size: int, linger: float):
        self._ledger, self._endpoint, self._linger = ledger, endpoint, linger
        self._session = secrets.token_hex(8)
        members, charter = ledger.run.members if ledger.run else {}, endpoint.seal.charter if endpoint.seal else None
        gone = {node for node in members if charter and node not in charter.nodes}
        self._state = ledger.resume(self._session, gone)
        self._spec = spec = ledger.spec
        self._tracker = StatusTracker(spec, charter=charter)
        self._report = report = self._tracker.observing(report)
        for total in ledger.contribution_totals():
            self._tracker.restore(*total)
        self._membership = Membership(spec.nodes, ledger.identities)
        self._expelled = gone  # and those that were refused: they are not waited for at the end
        self._started = self._opened = self._called = time.monotonic()
        self._heard_self = False
        self._alone_since: float | None = None  # when the last of those left who still want the result

        self._inbox: queue.Queue[object] = queue.Queue(_INBOX)
        self._herald = Herald(endpoint, spec, self._session, self._inbox)
        self._preferred_chunk = chunk_size
        self._transfer = BlobTransfer(endpoint, spec.federation, topics.COORDINATOR, ledger.store, self._inbox)
        self._uploads = PendingUploads(self._transfer)
        self._rounds = progress.RoundReporter(
            report, lambda: (self._transfer.bytes_received, self._transfer.bytes_sent)
        )
        self._activities = progress.ActivityReporter(report)

    def run(self, stop: Callable[[], bool]) -> Outcome | None:
        spec = self._spec
        self._herald.open()
        self._transfer.start()
        self._handle(self._inbox.get())  # Connected: what is retained of an earlier run is replaced
        self._herald.mqtt.flush(5)
        self._report(progress.Gathering(federation=spec.federation, run=spec.run, nodes=spec.nodes, rounds=spec.rounds))
        self._take_up()
        self._advance(rounds.Resumed())
        while not self._is_over():
            if stop():
                return None
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=_TICK))
            self._watch_clock()
            for blob in self._uploads:
                self._tell(blob.node, "sending", blob)
            self._say_overview()
        outcome = Outcome(
            self._ledger.broadcast,
            self._transfer.bytes_received,
            self._transfer.bytes_sent,
            time.monotonic() - self._started,
        )
        self._report(
            progress.FederationFinished(
                rounds=spec.rounds, bytes_up=outcome.bytes_up, bytes_down=outcome.bytes_down, seconds=outcome.seconds
            )
        )
        return outcome

    def close(self) -> None:
        self._say_overview(anyway=True)
        self._transfer.close()
        self._herald.close()

    def _take_up(self) -> None:
        """Show where an earlier process of this coordinator stopped."""
        if (rule := self._spec.aggregation).rule != "mean":
            against = f", against {rule.liars} liar(s)" if rule.liars else ""
            self._report(progress.Note(text=f"contributions become one model by {rule.rule}, unweighted{against}"))
        if self._state.status is rounds.Status.GATHERING:
            return
        if self._state.status is rounds.Status.FINISHED:
            self._report(progress.Note(text="this run had finished before; --new begins another one"))
        else:
            self._report(progress.Note(text=f"going on with run {self._spec.run} in round {self._state.round}"))
            self._rounds.open(self._state.round)
            if away := self._state.missing - self._expelled:
                names = ", ".join(sorted(away))
                self._report(progress.Note(text=f"{names}: {GRACE:.0f} s to come back, or the round may close without"))
        if self._expelled:
            names, quorum = ", ".join(sorted(self._expelled)), self._state.plan.quorum
            self._report(progress.Note(text=f"no member any more: {names}; the others go on, {quorum} close a round"))

    def _is_over(self) -> bool:
        """Whether the last round is closed and nobody can be expected who has yet to fetch the result."""
        if self._state.status is not rounds.Status.FINISHED:
            return False
        waiting = self._ledger.identities.keys() - self._ledger.finished - self._expelled
        if not waiting:
            return True
        if waiting & self._state.present:
            self._alone_since = None
            return False
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
            names, command = ", ".join(sorted(waiting)), "edge-node coordinate"
            self._report(
                progress.Note(
                    text=f"waiting {self._linger:g} s for {names} to fetch the result; {command} serves it again later"
                )
            )
        return now - self._alone_since >= self._linger

    def _watch_clock(self) -> None:
        now = time.monotonic()
        for node in self._membership.pop_silent(now):
            self._lost(node)
        if now - self._called > GRACE and self._herald.mqtt.is_connected:
            self._call_roll()
        if self._state.status is rounds.Status.OPEN:
            age, spec, round_ = now - self._opened, self._spec, self._state.round
            if spec.min_wait and age >= spec.min_wait and not self._state.waited:
                self._advance(rounds.Waited(round_))
            if spec.deadline and age >= spec.deadline and not self._state.expired:
                self._advance(rounds.Expired(round_))

    # What arrives

    def _handle(self, event: object) -> None:
        match event:
            case Delivery():
                self._receive(event)
                self._herald.mqtt.ack(event)
            case Fetched(manifest):
                self._arrived(manifest)
            case FetchFailed(manifest) if manifest not in self._uploads:
                pass  # nobody waits for it any more
            case FetchFailed(_, reason, peers_fault=False):
                raise EdgeNodeError(reason, "then start the coordinator again: it goes on where it was")
            case FetchFailed(manifest, reason):
                self._refuse(PeerError(manifest.node, f"its contribution did not arrive: {reason}", manifest.round))
            case Connected():
                self._announce()
            case Disconnected(_, reason):
                self._report(progress.Note(text=f"connection lost ({reason}); trying again"))

    def _announce(self) -> None:
        """(Re)publish what is retained: a broker restarted without persistence has forgotten it."""
        self._call_roll()
        self._herald.say_spec()
        self._say_round()
        self._say_overview(anyway=True)

    def _call_roll(self) -> None:
        """Whoever is there answers with Hello. A broker that was killed has forgotten the last wills of the others."""
        self._herald.say_presence(online=True)
        self._called = time.monotonic()
        self._membership.expect_answers(self._state.present, self._called)

    def _receive(self, delivery: Delivery) -> None:
        node = topics.sender(delivery.topic)
        if not delivery.payload:
            return
        if node == topics.COORDINATOR:
            self._check_own(delivery)
            return
        try:
            if not topics.is_name(node):
                raise PeerError(brief(node, 64), "no node can have this name", self._state.round)
            if self._is_too_much(node, 1):
                return
            if delivery.topic == topics.up(self._spec.federation, node):
                self._tracker.record_message(node)
            self._dispatch(node, decode_any(delivery.payload))
        except DecodeError as error:
            self._refuse(PeerError(node, f"its message cannot be read: {error}", self._state.round))
        except PeerError as error:
            self._refuse(error)

    def _is_too_much(self, node: str, messages: int) -> bool:
        """Count what a node sends; whether to ignore it. PeerError if that is the node's fault for certain.

        What it has signed the broker may have repeated, which must not have it refused.
        """
        if not self._membership.is_flooding(node, time.monotonic(), messages):
            return False
        why = f"it sends more than {MAX_MESSAGES} messages in {WINDOW:g} s"
        if self._endpoint.seal is None:
            raise PeerError(node, why, self._state.round)
        if self._membership.is_first_report("floods", node):
            self._report(progress.Note(text=f"ignoring {node} for a while: {why}, or the broker repeats them"))
        return True

    def _check_own(self, delivery: Delivery) -> None:
        """Somebody speaks as the coordinator: an earlier process of ours, whose will comes late, or another one.

        Of two that started at the same time one goes on, whose session comes first. What comes before our own presence
        has come back is old: the broker kept it for whoever coordinates.
        """
        with contextlib.suppress(DecodeError):
            presence = decode(delivery.payload, Presence)
            if presence.session == self._session:
                self._heard_self |= not delivery.retain
                return
            if not self._heard_self:
                return
            if presence.online and presence.session not in self._ledger.sessions:
                if presence.session < self._session:
                    raise claimed(self._spec.federation, self._endpoint)
                self._announce()
                return
        if not delivery.retain:
            self._herald.say_presence(online=True)

    def _dispatch(self, node: str, message: AnyMessage) -> None:
        match message:
            case Presence(session=session, online=False):
                if self._membership.session(node) == session:
                    self._lost(node)
            case Presence():
                pass
            case Hello():
                another = message.session != self._membership.session(node)
                if not (another and self._is_too_much(node, HELLO_COST)):
                    self._welcome(node, message)
            case Finished():
                over = message.run == self._spec.run and self._state.status is rounds.Status.FINISHED
                if over and node in self._ledger.identities:
                    self._ledger.finish(node)  # whatever its session was: the model is there
            case Contribution() | Telemetry() if (
                message.run != self._spec.run or self._membership.session(node) != message.session
            ):
                pass  # of an earlier run or session: without effect
            case Contribution():
                self._offered(node, message)
            case Telemetry():
                if message.round <= self._state.round and self._membership.is_first_report(
                    "telemetry", node, message.round
                ):
                    self._report(progress.Measured(node=node, round=message.round, metrics=message.metrics))
            case _:
                raise PeerError(node, f"a node does not send {type(message).__name__}", self._state.round)

    def _welcome(self, node: str, hello: Hello) -> None:
        present = node in self._state.present
        refusal = self._membership.find_objection(node, hello, self._spec.run, present=present)
        if refusal is not None:
            if self._membership.is_first_report("not let in", node, refusal.reason):
                self._report(progress.Note(text=f"{node} was not let in: {refusal.reason}"))
            self._herald.answer(node, refusal)
        elif not self._membership.is_stale(node, hello):
            is_new = not present or self._membership.session(node) is None
            self._ledger.admit(node, hello.identity)
            self._membership.admit(node, hello)
            self._expelled.discard(node)
            self._herald.answer(node, Welcome(session=hello.session))
            if is_new:
                self._report(progress.NodeJoined(node=node))
                self._advance(rounds.Joined(node))
                if node in self._state.missing and self._state.status is rounds.Status.OPEN:
                    self._tell(node, "training")

    def _lost(self, node: str) -> None:
        if node in self._state.present and node not in self._ledger.finished:
            self._report(progress.NodeLost(node=node, round=self._state.round))
        self._leave(node)

    def _leave(self, node: str) -> None:
        self._activities.reset(node)
        self._membership.confirm(node)
        self._advance(rounds.Left(node))

    # Contributions

    def _offered(self, node: str, message: Contribution) -> None:
        state = self._state
        if state.status is rounds.Status.OPEN and message.round == state.round and node in state.contributed:
            self._accept(node, message)  # its effect is on disk
            return
        if state.status is rounds.Status.FINISHED or message.round < state.round:
            self._settle_late(node, message)
            return
        if state.status is not rounds.Status.OPEN or message.round > state.round:
            raise PeerError(node, f"round {message.round} is not open", message.round)
        if not state.takes_part(node):
            raise PeerError(node, f"it was not drawn for round {message.round}", message.round)
        self._ledger.validate(node, message)
        if message.blob is None:
            self._add(node, message)
            return
        self._uploads.fetch(message)

    def _settle_late(self, node: str, message: Contribution) -> None:
        """A contribution to a round that is closed: summed before it closed, or too late."""
        if self._ledger.has_counted(node, message.round):
            self._accept(node, message)
            return
        reason = f"round {message.round} was closed before this contribution came"
        if self._membership.is_first_report("late", node, message.round):
            self._report(progress.Late(node=node, round=message.round))
        self._herald.answer(
            node, Accepted(session=message.session, run=message.run, round=message.round, counted=False, reason=reason)
        )

    def _arrived(self, manifest: Manifest) -> None:
        message = self._uploads.pop(manifest)
        if message is not None:
            try:
                self._add(manifest.node, message)
            except PeerError as error:
                self._refuse(error)
        if all(each.digest != manifest.digest for each in self._uploads):  # else a node could fill the disk
            self._ledger.discard(manifest.digest)

    def _add(self, node: str, message: Contribution) -> None:
        """Validate a contribution that is here, write it down, sum it, tell its node."""
        self._ledger.add_contribution(node, message)
        size = message.blob.size if message.blob else 0
        self._accept(node, message)
        self._report(progress.Contribution(node=node, round=message.round, weight=message.weight, bytes=size))
        self._tell(node, "waiting")
        self._advance(rounds.Contributed(node))

    def _accept(self, node: str, message: Contribution) -> None:
        self._herald.answer(node, Accepted(session=message.session, run=message.run, round=message.round))

    def _refuse(self, error: PeerError) -> None:
        """Name the peer, tell it why, go on without it."""
        node = error.peer
        self._uploads.cancel(node)
        session = self._membership.expel(node)
        if self._membership.is_first_report("refused", node):
            self._report(progress.NodeRefused(node=node, round=self._state.round, reason=error.why))
        if session is not None:
            self._expelled.add(node)
            remedy = "check the node's version and disk, then join again"
            self._herald.answer(node, Refusal(session=session, reason=error.why[:2000], remedy=remedy))
            self._leave(node)

    # Rounds

    def _advance(self, event: rounds.Event) -> None:
        self._state, effects = rounds.advance(self._state, event)
        for effect in effects:
            match effect:
                case rounds.Open(round_, drawn):
                    self._open(round_, drawn)
                case rounds.Close(_, contributors):
                    self._close_round(contributors)
                case rounds.Finish():
                    self._ledger.conclude()
                    self._say_round()
                case rounds.Pause(round_):
                    absent = sorted(
                        node for node in self._state.members - self._state.present - self._state.contributed
                    )
                    self._report(progress.Paused(round=round_, waiting_for=absent))
                    self._say_round()
                case rounds.Resume(round_):
                    self._report(progress.Note(text=f"enough nodes are there again: round {round_} goes on"))
                    self._say_round()

    def _open(self, round_: int, drawn: frozenset[str]) -> None:
        self._ledger.open_round(round_, drawn)
        self._opened = time.monotonic()
        self._say_round()
        self._rounds.open(round_)
        for node in sorted(self._state.missing):
            self._tell(node, "training")

    def _close_round(self, contributors: frozenset[str]) -> None:
        self._uploads.cancel_all()
        self._transfer.withdraw(self._ledger.broadcast_blob.digest)
        missing = sorted(self._ledger.absent)
        self._ledger.aggregate()
        self._rounds.close(sorted(contributors), missing)

    def _say_round(self) -> None:
        """Say where the federation stands, and serve what a round starts from."""
        chunk_size = self._transfer.chunk_size(self._preferred_chunk)
        self._transfer.offer(self._ledger.broadcast_blob.digest, chunk_size)
        self._herald.say_round(self._state, self._ledger.broadcast_blob, chunk_size)

    def _say_overview(self, *, anyway: bool = False) -> None:
        """Tell whoever watches, unless there is no connection: what waited for it would be out of date."""
        if self._herald.mqtt.is_connected:
            overview = self._tracker.next_overview(self._state, self._ledger.finished, anyway=anyway)
            if overview:
                self._herald.say_overview(overview)

    def _tell(self, node: str, what: progress.Doing, blob: Manifest | None = None) -> None:
        """What a node does, as far as it can be known here."""
        done, total = (self._transfer.received(blob.digest), blob.size) if blob else (0, 0)
        self._activities.report(
            progress.Activity(node=node, round=self._state.round, what=what, done=done, total=total)
        )
