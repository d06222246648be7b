"""A node's session: its part in a federation's rounds,
at whose end its personal model is on its own disk.

The main thread handles messages and never trains; a worker trains in a thread, and never touches
this connection.
"""

import contextlib
import queue
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from broker_config.protocol.codec import DecodeError, decode, decode_any
from broker_config.protocol.errors import BrokerError
from broker_config.protocol.messages import REVISION, Hello, Spec, Telemetry, Welcome
from broker_config.protocol.round_contents import is_statistics_round
from broker_config.security.message_encryption import NodeEncryption
from broker_config.security.signing import ForgedError
from broker_config.storage.disk import lock_folder
from broker_config.transfer.blob_transfer import BlobTransfer, Damaged, Fetched, FetchFailed
from trainer import progress as events
from trainer.data.class_folders import Images
from trainer.federation.client import checkpoint, session_events
from trainer.federation.client.checkpoint import Progress
from trainer.federation.client.connection import ClientConnection
from trainer.federation.client.masked_contributions import MaskedContributions
from trainer.federation.client.plant_checks import PlantCheck
from trainer.federation.client.session_events import (
    Answer,
    Begun,
    Contributed,
    Deployed,
    Effect,
    Event,
    Failed,
    Refined,
)
from trainer.federation.client.session_state import (
    NewRunError,
    Plan,
    Session,
    advance,
    current_activity,
)
from trainer.federation.client.spec_check import check_spec
from trainer.federation.client.training_thread import Worker
from trainer.federation.presence import await_broker, take_another_name
from trainer.progress.timeline import Timeline
from trainer.training.method_notice import MethodNotice

_INBOX = 1024
_FAREWELL = 30.0  # seconds for the coordinator's broker to learn that we have our model


def take_part(
    spec: Spec,
    name: str,
    images: Images,
    endpoint: Endpoint,
    folder: Path,
    *,
    telemetry: bool,
    report: events.Report,
    stop: Callable[[], bool],
    preview: bool = False,
    checks: Mapping[str, PlantCheck] = {},
    was_over: bool = False,
) -> Path | None:
    """Take part in a federation to its end.

    Returns the personal model's folder, or None when `stop` ended it before.

    A node that wants a `preview` returns that file instead: its model is not made. In a choosing
    run no node makes one; the coordinator hears what each encoder costs, and any other node waits
    for the next run, which NewRunError tells.

    Its `checks` say how much of its images a private federation may spend, and look at the tensors
    that it begins with before anything of its images leaves.

    A node for which the run `was_over` contributes nothing: NewRunError says if it goes on.

    A node that was not let in, or has received nothing, leaves no new state folder.

    Raises:
        EdgeNodeError: with what to do about it.
    """
    check_spec(spec)
    new = not folder.exists()
    with lock_folder(folder):
        checkpoint.keep_spec(folder, spec)
        node = _Node(
            spec,
            name,
            images,
            endpoint,
            folder,
            telemetry,
            report,
            preview,
            checks,
            was_over,
        )
        try:
            return node.run(stop)
        finally:
            node.close()
            if new and not (
                node.state.contact.is_admitted
                and any(path.is_file() for path in (folder / "blobs").rglob("*"))
            ):
                shutil.rmtree(folder)


Performers = Mapping[type[Effect], Callable[[Any], Answer | None]]
"""What performs an effect, by its type; an answer is the next event."""


class _Node:
    """The shell around the session's state machine."""

    def __init__(
        self,
        spec: Spec,
        name: str,
        images: Images,
        endpoint: Endpoint,
        folder: Path,
        telemetry: bool,
        report: events.Report,
        preview: bool,
        checks: Mapping[str, PlantCheck],
        was_over: bool,
    ):
        self._spec = spec
        self._name = name
        identity = checkpoint.begin_session(folder)
        self._encryption: NodeEncryption | None = None
        if spec.encryption == "group":
            self._encryption = NodeEncryption(spec.federation, spec.run, name, identity.session)
            endpoint = endpoint.encrypting(self._encryption)
        self._endpoint = endpoint
        self._telemetry = telemetry
        self._report = report
        self._activities = events.ActivityReporter(report)
        self._inbox: queue.Queue[object] = queue.Queue(_INBOX)
        previews = preview or spec.chooses
        self._worker = worker = Worker(
            spec,
            name,
            images,
            folder,
            self._inbox,
            previews=previews,
            checks=checks,
        )
        self._masked: MaskedContributions | None = None
        if spec.mask_threshold:
            session = identity.session
            signer = endpoint.signer
            self._masked = MaskedContributions(spec, name, session, signer, folder, worker.classes)
        self._notice = MethodNotice(worker.method, report)
        self._timeline = Timeline(folder, spec.run)
        plan = Plan(
            spec,
            name,
            identity.session,
            folder,
            deploys_final=worker.deploys_final,
            needs_final=worker.needs_final,
            has_images=len(images.train.labels) > 0,
            previews=previews,
            awaits_next=spec.chooses and not preview,
            was_over=was_over,
        )
        self.state = Session(plan, worker.found.progress, worker.found.lost)
        self._connection = ClientConnection(
            endpoint,
            spec,
            name,
            identity,
            self._inbox,
            report,
            server="coordinator",
            persistent=True,
            remedy=f"stop one of them, or {take_another_name(endpoint)}",
        )
        self._transfer = BlobTransfer(
            endpoint,
            spec.federation,
            name,
            worker.store,
            self._inbox,
            may_ask=lambda asker: asker == topics.COORDINATOR,
        )
        self._rounds = events.RoundReporter(
            report, lambda: (self._transfer.bytes_sent, self._transfer.bytes_received)
        )
        self._sent_before = 0  # bytes, when the newest contribution was offered
        self._performers: Performers = {
            session_events.Look: self._look,
            session_events.Serve: self._serve,
            session_events.GoBack: self._go_back,
            session_events.Apply: self._apply,
            session_events.AnswerStep: self._answer_step,
            session_events.Mask: self._mask,
            session_events.Announce: self._announce,
            session_events.Send: self._send,
            session_events.TellKeys: self._tell_keys,
            session_events.TellFinished: lambda _: self._connection.tell_finished(),
            session_events.TellMetrics: lambda each: self._report_metrics(each.progress),
            session_events.TellOutcome: lambda each: self._send_metrics(spec.rounds, each.metrics),
            session_events.CheckRun: self._look_for_run,
            session_events.Fail: self._fail,
            session_events.Fetch: self._fetch,
            session_events.Cancel: lambda each: self._transfer.cancel(each.manifest),
            session_events.Withdraw: lambda each: self._transfer.withdraw(each.digest),
            session_events.Purge: lambda each: worker.store.purge(each.kept),
            session_events.Train: lambda each: worker.train(each.broadcast, counted=each.counted),
            session_events.Deploy: lambda each: worker.deploy(each.final, counted=each.counted),
            session_events.OpenRound: self._open_round,
            session_events.CloseRound: lambda _: self._rounds.close([self._name]),
            session_events.Report: lambda each: report(each.event),
            session_events.Begin: lambda each: self._timeline.begin(each.activity, each.round),
            session_events.End: lambda each: self._timeline.end(each.activity),
        }

    def run(self, stop: Callable[[], bool]) -> Path | None:
        started = time.monotonic()
        spec = self._spec
        connecting = (self._connection.mqtt.open, self._transfer.start)
        if not all(await_broker(each, self._report, stop) for each in connecting):
            return None
        self._report(
            events.Gathering(
                federation=spec.federation, run=spec.run, nodes=spec.nodes, rounds=spec.rounds
            )
        )
        self._advance(session_events.Started(self._worker.found.damaged))
        while self.state.result is None:
            if stop():
                return None
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=0.2))
            self._advance(session_events.Tick(time.monotonic() - started))
            self._activities.report(self._activity())
        self._connection.finish(_FAREWELL)
        up = self._transfer.bytes_sent
        down = self._transfer.bytes_received
        seconds = time.monotonic() - started
        self._report(
            events.FederationFinished(
                rounds=spec.rounds, bytes_up=up, bytes_down=down, seconds=seconds
            )
        )
        return self.state.result

    def close(self) -> None:
        self._worker.close()
        self._transfer.close()
        self._connection.close()

    # Events

    def _handle(self, arrived: object) -> None:
        match arrived:
            case Delivery():
                self._receive(arrived)
                self._connection.mqtt.ack(arrived)
            case Failed(error):
                raise error
            case Connected() | Disconnected() | TakenOver():
                self._connection.observe(arrived)
                if isinstance(arrived, Connected):
                    self._advance(session_events.Connected())
            case Contributed() | Refined() | Begun() | Deployed():
                self._advance(arrived)
            case Fetched() | FetchFailed() | Damaged():
                self._advance(arrived)
            case events.Step():
                self._report(arrived)

    def _receive(self, delivery: Delivery) -> None:
        if not delivery.payload:
            return
        try:
            message = decode_any(delivery.payload)
        except DecodeError as error:
            self._note(f"ignored an unreadable message on {delivery.topic}: {error}")
            return
        if isinstance(message, Spec):
            self._connection.observe_spec(message)
            if self.state.plan.awaits_next and message.run != self._spec.run:
                self._check_run()
        elif not isinstance(message, Welcome) or self._take_keys(message):
            self._advance(session_events.Received(message, delivery.topic))

    def _take_keys(self, welcome: Welcome) -> bool:
        """Take the keys of a Welcome, if messages are encrypted;
        False if the Welcome means nothing therefore.
        """
        if self._encryption is None or welcome.session != self.state.plan.session:
            return True
        try:
            is_new = self._encryption.take_keys(welcome)
        except ForgedError as error:
            self._note(f"ignored that the coordinator lets us in: {error}")
            return False
        if is_new:  # what it has published before can be read now, and comes again
            self._connection.mqtt.renew_subscriptions()
            self._transfer.renew_subscriptions()
        return True

    def _advance(self, event: Event) -> None:
        pending = deque[Event]([event])
        while pending:
            self.state, effects = advance(self.state, pending.popleft())
            for effect in effects:
                answer = self._performers[type(effect)](effect)
                if answer is not None:
                    pending.append(answer)

    # Effects that are answered by an event

    def _look(self, effect: session_events.Look) -> Answer:
        store = self._worker.store
        digest = effect.digest
        return session_events.Looked(digest, store.is_intact(digest), store.path(digest))

    def _serve(self, effect: session_events.Serve) -> Answer:
        chunk_size = self._transfer.chunk_size(effect.blob.chunk_size)
        blob = msgspec.structs.replace(effect.blob, chunk_size=chunk_size)
        is_intact = self._transfer.offer(blob.digest, blob.chunk_size)
        return session_events.Served(blob, is_intact, self._worker.store.path(blob.digest))

    def _go_back(self, effect: session_events.GoBack) -> Answer:
        is_exact = self._worker.go_back(effect.round)
        return session_events.WentBack(effect, self._worker.progress, is_exact)

    def _apply(self, effect: session_events.Apply) -> Answer:
        is_made = self._worker.apply(effect.delta, effect.broadcast, final=effect.is_final)
        return session_events.Applied(effect.delta, is_made)

    def _answer_step(self, effect: session_events.AnswerStep) -> Answer | None:
        assert self._masked
        step = effect.step
        for answer in self._masked.advance(step):
            self._connection.send(answer)
        is_known = (step.counted or step.shares) and self._masked.can_mask(step.round)
        return session_events.CanMask(step.round) if is_known else None

    def _mask(self, effect: session_events.Mask) -> Answer:
        assert self._masked
        progress = effect.progress
        assert progress.blob
        store = self._worker.store
        blob = self._masked.mask(store, self._worker.method, progress)
        return session_events.Masked(blob, store.path(progress.blob.digest))

    # Effects that the coordinator hears of, or that end the session

    def _announce(self, effect: session_events.Announce) -> None:
        self._connection.announce()
        key = self._encryption.public if self._encryption else ""
        hello = Hello(
            **self._connection.hello,
            round=effect.round,
            key=key,
            masks=self._masked is not None,
            revision=REVISION,
        )
        self._connection.send(hello)
        if effect.is_served:
            self._connection.tell_finished()

    def _send(self, effect: session_events.Send) -> None:
        self._sent_before = self._transfer.bytes_sent
        self._connection.send(effect.message)

    def _tell_keys(self, effect: session_events.TellKeys) -> None:
        assert self._masked
        self._connection.send(self._masked.begin(effect.round))

    def _look_for_run(self, effect: session_events.CheckRun) -> None:
        self._check_run()
        if effect.refusal:
            self._connection.raise_refusal(effect.refusal)

    def _fail(self, effect: session_events.Fail) -> None:
        raise effect.error from effect.cause

    # Other effects

    def _fetch(self, effect: session_events.Fetch) -> None:
        self._worker.store.remove_damaged(effect.manifest.digest)  # it may just have arrived
        self._transfer.fetch(effect.manifest)

    def _open_round(self, effect: session_events.OpenRound) -> None:
        self._rounds.close([self._name])
        sums = is_statistics_round(self._spec, effect.round)
        self._rounds.open(effect.round, sums=sums)

    def _check_run(self) -> None:
        """Raise NewRunError if there is a newer run: what told of one may be old,
        and kept by the broker.
        """
        topic = topics.spec(self._spec.federation)
        try:
            current = read_retained(self._endpoint, [topic], wait=1.0).get(topic)
        except BrokerError:
            return  # the round comes again when the broker is back
        if current is None:
            return
        try:
            run = decode(current, Spec).run
        except DecodeError as error:
            self._note(f"ignored an unreadable message on {topic}: {error}")
            return
        if run != self._spec.run:
            raise NewRunError(
                "the coordinator has started a new run of this federation",
                "run edge-node join again",
            )

    def _report_metrics(self, progress: Progress) -> None:
        metrics = {name: value for name, value in progress.history[-1].items() if name != "round"}
        if not metrics:
            return
        self._report(events.Measured(node=self._name, round=progress.round, metrics=metrics))
        self._notice.check(progress.round, {self._name: metrics})
        if self._telemetry:
            self._send_metrics(progress.round, metrics)

    def _send_metrics(self, round_: int, metrics: Mapping[str, float]) -> None:
        self._connection.send(
            Telemetry(
                session=self.state.plan.session,
                run=self._spec.run,
                round=round_,
                metrics=dict(metrics),
            )
        )

    def _note(self, text: str) -> None:
        self._report(events.Note(text=text))

    def _activity(self) -> events.Activity:
        """What the node does now, and how far it is with that."""
        state = self.state
        what = current_activity(self.state)
        done = total = 0
        if what == "sending" and state.progress and state.progress.blob:
            total = state.progress.blob.size
            done = min(total, self._transfer.bytes_sent - self._sent_before)
        elif what == "judging":
            done, total = self._worker.judged
        elif state.fetching and what == "receiving":
            done = self._transfer.received(state.fetching.digest)
            total = state.fetching.size
        return events.Activity(
            node=self._name,
            round=state.open_round or state.rounds_done,
            what=what,
            done=done,
            total=total,
        )
