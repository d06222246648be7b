"""The coordinator's process: MQTT and clock around the state machine of rounds and the durable
ledger.
"""

import contextlib
import queue
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from broker_config.mqtt.client import (
    Connected,
    Delivery,
    Disconnected,
    Endpoint,
    TakenOver,
    read_retained,
)
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode, decode_any, encode
from broker_config.protocol.errors import (
    BrokerError,
    EdgeNodeError,
    PeerError,
    UsageError,
    abbreviate,
)
from broker_config.protocol.messages import (
    AnyMessage,
    Contribution,
    Delta,
    Finished,
    Hello,
    Manifest,
    MaskingAnswer,
    Presence,
    RoundState,
    Spec,
    Telemetry,
)
from broker_config.protocol.round_contents import is_statistics_round, needed_revision
from broker_config.security import mask_keys
from broker_config.security.message_encryption import CoordinatorEncryption
from broker_config.security.signing import ForgedError
from broker_config.transfer.blob_transfer import BlobTransfer, Damaged, Fetched, FetchFailed
from trainer import progress
from trainer.federation.masking.step_parts import split
from trainer.federation.presence import await_broker, check_no_server
from trainer.federation.server.connection import ServerConnection, publish_retained
from trainer.federation.server.coordinator import effects, events
from trainer.federation.server.coordinator.coordinator_machine import advance
from trainer.federation.server.coordinator.coordinator_state import Coordination, ProcessPlan
from trainer.federation.server.coordinator.round_state import Status
from trainer.federation.server.ledger import Ledger, least_nodes
from trainer.federation.server.membership import HELLO_COST, Membership
from trainer.federation.server.operator_actions import Action, ActionReader, replay
from trainer.federation.server.pending_uploads import PendingUploads
from trainer.federation.server.spec import flat_settings
from trainer.federation.server.status import StatusTracker, aborted_message, round_message
from trainer.models.named_tensors import Arrays
from trainer.progress import event_log

CHUNK = 256 * 1024  # bytes of a broadcast in a message; a broker's lower limit is honoured
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
    linger: float = LINGER,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome | None:
    """Run a federation from where its ledger stands to its end;
    None when `stop` said to suspend it.

    Args:
        ledger: of this run, or empty.
        spec: as it is wanted; a run that has begun keeps its own.
        broadcast: that a new run starts from.
        endpoint: the broker.
        report: shows progress.
        new: begin another run.
        linger: seconds that the result is kept ready for nodes that are away when the last round
            closes; and, where the run had finished before and newcomers can make a model of its
            result, for these. And that a coordinator whose state is an older copy waits for nodes
            that have finished the run. A run that only chooses an encoder waits for at least
            LINGER: another choice would be made without its nodes.
        stop: asked often.

    Raises:
        BrokerError: the broker cannot be reached.
        UsageError: the federation is already coordinated on this broker, the ledger's run has other
            settings, or its contributions are to be masked, and members have no keys.
        EdgeNodeError: the disk fails. Started again with the same ledger, the federation goes on.
    """
    if spec.mask_threshold and endpoint.signer is None:
        raise UsageError(
            "secure aggregation needs kits: a node must know that it shares masks with members, "
            "and not with whoever speaks for them",
            "take a kit (--kit), or leave out --secure-aggregation",
        )
    if not await_broker(lambda: check_no_server(endpoint, spec.federation), report, stop):
        return None
    ledger.begin_or_continue(spec, broadcast, new=new)
    if spec.chooses:
        linger = max(linger, LINGER)
    with event_log.logging(ledger.folder, report) as logged:
        has_ended = _has_ended(ledger, endpoint)
        coordinator = _Coordinator(ledger, endpoint, logged, linger, has_ended=has_ended)
        try:
            return coordinator.run(stop)
        finally:
            coordinator.close()


def _has_ended(ledger: Ledger, endpoint: Endpoint) -> bool:
    """Whether the broker retains that the ledger's open run has finished:
    then the ledger is an older copy.
    """
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
            f"the run of federation {spec.federation!r} in {ledger.folder} was "
            f"{ledger.run.outcome} before",
            "there is nothing to abort; begin another run with edge-node coordinate --new",
        )
    state = aborted_message(spec, ledger.run.round, reason)
    if not publish_retained(endpoint, {topics.round_state(spec.federation): encode(state)}):
        raise EdgeNodeError(
            f"{endpoint} did not confirm within 10 s that it tells the nodes", "try again"
        )
    ledger.abort()


Performers = Mapping[type[effects.Effect], Callable[[Any], object]]


class _Coordinator:
    """The process around the coordinator's machine, which performs its effects."""

    def __init__(
        self,
        ledger: Ledger,
        endpoint: Endpoint,
        report: progress.Report,
        linger: float,
        *,
        has_ended: bool,
    ):
        self._ledger = ledger
        self._signer = endpoint.signer
        members = ledger.run.members if ledger.run else {}
        member_list = endpoint.signer.members if endpoint.signer else None
        gone = frozenset(node for node in members if member_list and node not in member_list.nodes)
        assert ledger.run is not None
        self._spec = spec = ledger.run.spec
        self._most_dropped = spec.nodes - least_nodes(spec) - len(gone)
        self._actions = ActionReader(ledger.folder, spec.run)
        actions = self._actions.read()
        self._unread = ""  # why later ones cannot be read
        self._postponed = [
            each for each in actions if each.what == "drop" and each.node in ledger.survivors
        ]
        self._control = replay(
            [each for each in actions if each not in self._postponed], self._most_dropped
        )
        gone |= self._control.dropped
        federation = ledger.resume(gone)._replace(held=self._control.is_paused)
        now = time.monotonic()
        masking = ledger.masks() if spec.mask_threshold else None
        if masking and masking.survivors:
            federation = federation._replace(status=Status.UNMASKING)
        session = secrets.token_hex(8)
        self._encryption: CoordinatorEncryption | None = None
        if spec.encryption == "group":
            self._encryption = CoordinatorEncryption(spec.federation, spec.run, session)
            endpoint = endpoint.encrypting(self._encryption)
        is_finished = federation.status is Status.FINISHED
        serves_newcomers = is_finished and bool(spec.statistics) and not spec.chooses
        self._state = Coordination(
            ProcessPlan(spec, session, ledger.folder, linger, serves_newcomers),
            federation,
            now,
            excluded=gone,
            dropped=self._control.dropped,
            was_over=has_ended,
            opened=now,
            joined=now,
            masking=masking,
        )
        self._tracker = StatusTracker(spec, member_list=member_list)
        self._report = report = self._tracker.observing(report)
        for total in ledger.contribution_totals():
            self._tracker.restore(*total)

        self._inbox: queue.Queue[object] = queue.Queue(_INBOX)
        self._membership = Membership(spec.nodes, ledger.identities)
        self._connection = ServerConnection(
            endpoint,
            spec,
            session,
            self._inbox,
            self,
            self._membership,
            report,
            persistent=True,
            needs_revision=needed_revision(spec),
            needs_masks=spec.mask_threshold > 0,
            encryption=self._encryption,
        )
        self._transfer = BlobTransfer(
            endpoint,
            spec.federation,
            topics.COORDINATOR,
            ledger.store,
            self._inbox,
            may_ask=lambda node: self._membership.session(node) is not None,
        )
        self._uploads = PendingUploads(self._transfer)
        self._rounds = progress.RoundReporter(
            report, lambda: (self._transfer.bytes_received, self._transfer.bytes_sent)
        )
        self._activities = progress.ActivityReporter(report)
        self._performers: Performers = {
            effects.Open: self._open_round,
            effects.Close: self._close_round,
            effects.Finish: self._finish,
            effects.Abort: self._abort,
            effects.Fail: self._fail,
            effects.Publish: lambda _: self._publish_round(),
            effects.Admit: self._admit,
            effects.WelcomeNewcomer: lambda each: self._connection.welcome(each.node, each.hello),
            effects.Reject: lambda each: self._connection.reject(each.node, each.refusal),
            effects.Refuse: lambda each: self._connection.refuse(each.error),
            effects.Collect: self._collect,
            effects.Cancel: lambda each: self._uploads.cancel(each.node),
            effects.Accept: lambda each: self._connection.send(each.node, each.accepted),
            effects.RecordFinished: lambda each: self._ledger.finish(each.node),
            effects.Forget: self._forget,
            effects.Drop: self._drop,
            effects.RecordMasks: lambda each: self._ledger.record_masks(each.facts, each.drawn),
            effects.Say: self._say,
            effects.Unmask: self._unmask,
            effects.ShowRound: self._show_round,
            effects.Show: self._show_activity,
            effects.Report: self._show,
        }

    def run(self, stop: Callable[[], bool]) -> Outcome | None:
        started = time.monotonic()
        spec = self._spec
        if not all(
            await_broker(each, self._report, stop)
            for each in (self._connection.open, self._transfer.start)
        ):
            return None
        self._handle(self._inbox.get())  # Connected: what is retained of an earlier run is replaced
        self._connection.mqtt.flush(5)
        self._report(
            progress.Gathering(
                federation=spec.federation,
                run=spec.run,
                nodes=spec.nodes,
                rounds=spec.rounds,
                settings=flat_settings(spec),
            )
        )
        self._advance(events.Started(self._ledger.damaged))
        # and the process that was to do it is not there any more
        if abort := self._control.aborted:
            self._advance(events.Acted(abort))
        self._tick()
        while not self._state.is_over:
            if stop():
                return None
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=_TICK))
            self._tick()
            for blob in self._uploads.in_progress():
                self._report_upload(blob)
            self._publish_status()
        up = self._transfer.bytes_received
        down = self._transfer.bytes_sent
        seconds = time.monotonic() - started
        self._report(
            progress.FederationFinished(
                rounds=spec.rounds, bytes_up=up, bytes_down=down, seconds=seconds
            )
        )
        return Outcome(self._ledger.broadcast, up, down, seconds)

    def close(self) -> None:
        self._publish_status(anyway=True)
        self._transfer.close()
        self._connection.close()

    @property
    def round(self) -> int:
        return self._state.rounds.round

    @property
    def present(self) -> frozenset[str]:
        return self._state.present

    # Events

    def _tick(self) -> None:
        self._connection.drop_silent_members()
        self._connection.repeat_roll_call()
        postponed = self._postponed
        self._postponed = []
        for action in (*postponed, *self._new_actions()):
            self._act(action)
        members = self._state.rounds.members if self._state.was_over else ()
        heard = [node for node in members if self._membership.session(node) is not None]
        self._advance(events.Tick(time.monotonic(), self._ledger.finished, heard))

    def _new_actions(self) -> list[Action]:
        """What the operator has done since the last time; what was done before holds on
        when the file is damaged meanwhile.
        """
        try:
            return self._actions.read()
        except EdgeNodeError as error:
            if error.what != self._unread:
                self._unread = error.what
                self._note(f"{error.what}; {error.remedy}")
            return []

    def _act(self, action: Action) -> None:
        if action.what == "drop" and self._state.rounds.status is Status.UNMASKING:
            # what is in a sum that is being unmasked cannot be taken out of it any more
            self._postponed.append(action)
            return
        before = self._control
        self._control = self._control.after(action, self._most_dropped)
        if self._control != before:
            self._advance(events.Acted(action))
        elif action.what == "drop" and action.node not in before.dropped:
            self._note(f"{action.node} cannot be dropped: too few nodes would be left")

    def _handle(self, event: object) -> None:
        match event:
            case Delivery() | Connected() | Disconnected() | TakenOver():
                self._connection.handle(event)
            case Fetched(manifest):
                self._handle_upload(manifest)
            case Damaged(digest):
                if digest == self._ledger.broadcast_blob.digest:
                    self._serve_broadcast()
                else:
                    self._publish_round()  # without the delta, if that was damaged
            case FetchFailed(manifest) if manifest not in self._uploads:
                pass  # it is not wanted any more
            case FetchFailed(manifest, error):
                if ours := event.ours("then start the coordinator again: it goes on where it was"):
                    raise ours from error
                self._connection.refuse(
                    PeerError(manifest.node, f"its contribution did not arrive: {error}")
                )

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
                    self._receive_hello(node, message)
            case Finished(run=run):
                if run == self._spec.run:  # whatever its session was: the model is there
                    self._advance(events.Told(node, message))
            case Contribution() | Telemetry() | MaskingAnswer() if (
                message.run,
                message.session,
            ) != (
                self._spec.run,
                session,
            ):
                pass  # of an earlier run or session: without effect
            case Contribution():
                was_counted = self._ledger.has_counted(node, message.round)
                self._advance(events.Told(node, message, was_counted))
            case MaskingAnswer() if self._state.masking is not None:
                self._verify_masking(node, message)
                self._advance(events.Told(node, message))
            case Telemetry():
                self._advance(events.Told(node, message))
            case _:
                raise PeerError(node, f"a node does not send {type(message).__name__}")

    def _receive_hello(self, node: str, hello: Hello) -> None:
        if not self._connection.may_join(node, hello, newcomer=self._state.is_newcomer(node)):
            return
        self._advance(
            events.Joined(
                node,
                hello,
                self._membership.session(node),
                self._ledger.newest_contribution(node),
                self._ledger.has_counted(node, self._spec.rounds),
            )
        )

    def _verify_masking(self, node: str, answer: MaskingAnswer) -> None:
        """Verify keys and signatures that others will be shown.

        PeerError if they are not the node's.
        """
        state = self._state.masking
        assert state is not None
        assert self._signer is not None
        scope = self._ledger.scope(answer.round)
        try:
            if answer.keys:
                statement = mask_keys.keys_statement(scope, node, answer.keys)
                self._signer.verify_statement(
                    node, mask_keys.KEYS, statement, answer.keys.signature
                )
                mask_keys.check(answer.keys)
            if answer.signature and answer.round == state.round and state.survivors:
                of = [*state.shares]
                statement = mask_keys.survivors_statement(scope, state.keys, of, state.survivors)
                self._signer.verify_statement(
                    node, mask_keys.SURVIVORS, statement, answer.signature
                )
        except ForgedError as error:
            raise PeerError(
                node, f"what it says about masks is not its own: {error}", answer.round
            ) from error

    def mark_lost(self, node: str) -> None:
        """A node's connection has ended."""
        self._advance(events.Left(node, node in self._ledger.finished))

    def exclude(self, node: str) -> None:
        """A node was refused."""
        self._advance(events.Refused(node))

    def _handle_upload(self, manifest: Manifest) -> None:
        message = self._uploads.pop(manifest)
        if message is not None:
            try:
                self._add_contribution(manifest.node, message)
            except PeerError as error:
                self._connection.refuse(error)
        # else a node could fill the disk
        if all(each.digest != manifest.digest for each in self._uploads):
            self._ledger.discard(manifest.digest)

    def _add_contribution(self, node: str, message: Contribution) -> None:
        """Validate a contribution whose blob is here, write it down, sum it, and accept it."""
        self._ledger.add_contribution(node, message)
        self._advance(events.Contributed(node, message))

    def _advance(self, event: events.Event) -> None:
        self._state, done = advance(self._state, event)
        for effect in done:
            self._performers[type(effect)](effect)

    # Effects

    def _finish(self, _: effects.Finish) -> None:
        self._ledger.conclude()
        self._publish_round()

    def _fail(self, effect: effects.Fail) -> None:
        raise effect.error

    def _say(self, effect: effects.Say) -> None:
        for part in split(effect.step):
            self._connection.send(effect.node, part)

    def _unmask(self, effect: effects.Unmask) -> None:
        if self._ledger.unmask(effect.masking):
            self._advance(events.Unmasked(effect.masking.round))

    def _admit(self, effect: effects.Admit) -> None:
        self._ledger.admit(effect.node, effect.hello.identity)
        self._connection.welcome(effect.node, effect.hello, effect.contributed)

    def _show(self, effect: effects.Report) -> None:
        if not effect.once or self._membership.is_first_report(*effect.once):
            self._report(effect.event)

    def _show_activity(self, effect: effects.Show) -> None:
        self._activities.report(
            progress.Activity(node=effect.node, round=effect.round, what=effect.what)
        )

    def _show_round(self, effect: effects.ShowRound) -> None:
        self._rounds.open(effect.round, sums=is_statistics_round(self._spec, effect.round))

    def _forget(self, effect: effects.Forget) -> None:
        self._activities.reset(effect.node)
        self._membership.confirm(effect.node)

    def _collect(self, effect: effects.Collect) -> None:
        node = effect.node
        message = effect.message
        self._ledger.validate(node, message)
        if message.blob is None:
            self._add_contribution(node, message)
        else:
            self._uploads.fetch(message)
            self._report_upload(message.blob)

    def _open_round(self, effect: effects.Open) -> None:
        round_ = effect.round
        self._ledger.open_round(round_, effect.drawn)
        opened = time.monotonic()
        self._publish_round()
        self._rounds.open(round_, sums=is_statistics_round(self._spec, round_))
        self._advance(events.Opened(opened))

    def _close_round(self, effect: effects.Close) -> None:
        self._uploads.cancel_all()
        for blob in self._ledger.served:
            self._transfer.withdraw(blob)
        missing = sorted(self._ledger.absent)
        limited = self._ledger.aggregate()
        self._rounds.close(sorted(effect.contributors), missing, limited)

    def _drop(self, effect: effects.Drop) -> None:
        """Go on without a node, and with other keys,
        which the others are given as they answer the roll call.
        """
        if self._encryption:
            self._encryption.draw_anew()
        self._advance(events.Dropped(effect.node, self._ledger.drop(effect.node)))
        self._connection.refuse(effect.error)
        if self._encryption:
            self._transfer.renew_subscriptions()
            self._connection.announce()

    def _abort(self, effect: effects.Abort) -> None:
        """End the run; nodes that are away learn of it when they next connect."""
        self._connection.publish_round(aborted_message(self._spec, self.round, effect.reason))
        self._connection.mqtt.flush(5)
        self._ledger.abort()

    # Reports

    def publish_state(self) -> None:
        """Publish the round and the nodes' status."""
        self._publish_round()
        self._publish_status(anyway=True)

    def _publish_round(self) -> None:
        """Publish where the federation stands, and serve the blob that the round starts from."""
        blob = self._ledger.broadcast_blob
        chunk_size = self._serve_broadcast()
        manifest = Manifest(
            federation=self._spec.federation,
            run=self._spec.run,
            round=self._state.rounds.round,
            node=topics.COORDINATOR,
            digest=blob.digest,
            size=blob.size,
            chunk_size=chunk_size,
        )
        delta = None
        if self._ledger.delta:
            base, coded = self._ledger.delta
            if self._transfer.offer(coded.digest, chunk_size):
                coded_manifest = msgspec.structs.replace(
                    manifest, digest=coded.digest, size=coded.size
                )
                delta = Delta(base=base, blob=coded_manifest)
        head = self._ledger.head
        if self._signer and head:
            signature = self._signer.sign_broadcast(manifest)
            head = self._signer.sign_head(head)
            manifest = msgspec.structs.replace(manifest, signature=signature)
        manifest = msgspec.structs.replace(manifest, record=head)
        self._connection.publish_round(
            round_message(self._spec, self._state.rounds, manifest, delta)
        )

    def _serve_broadcast(self) -> int:
        """Serve the broadcast, written anew if it was changed on the disk,
        and return the bytes of its chunks.
        """
        digest = self._ledger.broadcast_blob.digest
        chunk_size = self._transfer.chunk_size(CHUNK)
        if not self._transfer.offer(digest, chunk_size):
            path = self._ledger.write_broadcast_again()
            self._note(
                f"{path} was changed or removed: it is written again from memory; check this disk"
            )
            self._transfer.offer(digest, chunk_size)
        return chunk_size

    def _publish_status(self, *, anyway: bool = False) -> None:
        overview = self._tracker.next_overview(
            self._state.rounds, self._ledger.finished, anyway=anyway
        )
        if overview:
            self._connection.publish_status(overview)

    def _report_upload(self, blob: Manifest) -> None:
        """Report how much of a contribution has arrived."""
        done = self._transfer.received(blob.digest)
        self._activities.report(
            progress.Activity(
                node=blob.node, round=self.round, what="sending", done=done, total=blob.size
            )
        )

    def _note(self, text: str) -> None:
        self._report(progress.Note(text=text))
