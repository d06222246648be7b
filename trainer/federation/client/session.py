"""A node's session: its part in a federation's rounds, at whose end its personal model is on its own disk.

The main thread handles messages and never trains; a worker thread trains and never touches the network.
"""

import contextlib
import queue
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

import msgspec

from broker_config.mqtt.client import Connected, Delivery, Disconnected, Endpoint, TakenOver, read_retained
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode, decode_any, encoded_size
from broker_config.protocol.errors import BrokerError, EdgeNodeError
from broker_config.protocol.messages import (
    Accepted,
    AnyMessage,
    Contribution,
    Hello,
    Manifest,
    Presence,
    Refusal,
    RoundState,
    Spec,
    Stage,
    Telemetry,
    Welcome,
)
from broker_config.protocol.round_contents import basis, broadcast_tensors, is_statistics_round
from broker_config.storage.disk import lock_folder
from broker_config.transfer.blob_transfer import BlobTransfer, Damaged, Fetched, FetchFailed
from trainer import progress as events
from trainer.data.class_folders import Images
from trainer.federation.client import checkpoint
from trainer.federation.client.checkpoint import Progress
from trainer.federation.client.connection import ClientConnection
from trainer.federation.client.discovery import ended_early
from trainer.federation.client.spec_check import check_spec
from trainer.federation.client.training_thread import Contributed, Deployed, Failed, Refined, Worker
from trainer.federation.presence import await_room
from trainer.progress.timeline import Timeline
from trainer.training.method_notice import MethodNotice

_INBOX = 1024
_MIN_INTERVAL = 1.0  # seconds between two answers to roll calls; more would pile up at the broker
_SILENCE = 20.0  # seconds without an answer to Hello after which that is reported
_FAREWELL = 30.0  # seconds for the coordinator's broker to learn that we have our model
_STAGES = get_args(Stage)


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
) -> Path | None:
    """Take part in a federation to its end. Returns the personal model's folder, or None when `stop` ended it before.

    A node that wants a `preview` returns that file instead: its model is not made, and the coordinator hears its loss.

    A node that was not let in, or has received nothing, leaves no new state folder.

    Raises:
        EdgeNodeError: with what to do about it.
    """
    check_spec(spec)
    new = not folder.exists()
    with lock_folder(folder):
        checkpoint.keep_spec(folder, spec)
        node = _Node(spec, name, images, endpoint, folder, telemetry, report, preview)
        try:
            return node.run(stop)
        finally:
            node.close()
            if new and not (node.is_admitted and any(path.is_file() for path in (folder / "blobs").rglob("*"))):
                shutil.rmtree(folder)


class NewRunError(EdgeNodeError):
    """The coordinator has begun another run since this node read the spec."""


class _Node:
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
    ):
        self._spec, self._name, self._endpoint = spec, name, endpoint
        identity = checkpoint.begin_session(folder)
        self._session = identity.session  # of this process: messages for an earlier one have another
        self._telemetry, self._report = telemetry, report
        self._activities = events.ActivityReporter(report)
        self._inbox: queue.Queue[object] = queue.Queue(_INBOX)
        self._worker = Worker(spec, name, images, folder, self._inbox, previews=preview)
        self._notice = MethodNotice(self._worker.method, report)
        self._progress = self._worker.progress  # of the last stage that is on disk
        self._timeline = Timeline(folder, spec.run)
        self._busy = False  # the worker has a job whose result has not been handled yet
        self._states: dict[str, RoundState] = {}  # the newest of each process of the coordinator
        self._server = ""  # the process of the coordinator that has welcomed this one last
        self._model: Path | None = None
        self._has_images = len(images.train.labels) > 0
        self._is_served = False  # a newcomer has all that it needs of the coordinator
        self.is_admitted = False  # whether the coordinator has welcomed this process
        self._alone = False  # the coordinator was said to be away
        self._silence_noted = False  # whether it was reported that it has not
        self._roll_called = False  # whether the coordinator expects a Hello
        self._announced = 0.0  # when the last one was sent
        self._contributed = 0  # the newest round that the coordinator has a contribution of ours to, as it said last
        self._accepted = 0  # the newest round whose contribution the coordinator has, or no longer wants
        self._counted = 0  # the newest round whose contribution the coordinator has
        self._fetching: Manifest | None = None
        self._offered = 0  # the newest round whose contribution was offered, and bytes sent before that
        self._sent_before = 0
        self._connection = ClientConnection(
            endpoint, spec, name, identity, self._inbox, report,
            server="coordinator", persistent=True, remedy="stop one of them, or choose another --name",
        )  # fmt: skip
        self._transfer = BlobTransfer(
            endpoint, spec.federation, name, self._worker.store, self._inbox,
            may_ask=lambda asker: asker == topics.COORDINATOR,
        )  # fmt: skip
        self._rounds = events.RoundReporter(report, lambda: (self._transfer.bytes_sent, self._transfer.bytes_received))

    def run(self, stop: Callable[[], bool]) -> Path | None:
        started, spec = time.monotonic(), self._spec
        if not all(await_room(each, self._report, stop) for each in (self._connection.mqtt.open, self._transfer.start)):
            return None
        self._report(events.Gathering(federation=spec.federation, run=spec.run, nodes=spec.nodes, rounds=spec.rounds))
        self._timeline.begin("waiting", self._rounds_done() + 1)
        for path in self._worker.damaged:
            self._note(f"{path} is damaged: going on from the end of the round before, and training the next one again")
        while self._model is None:
            if stop():
                return None
            self._note_silence(time.monotonic() - started)
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=0.2))
            if self._roll_called and time.monotonic() - self._announced > _MIN_INTERVAL:
                self._announce()
            self._activities.report(self._activity())
        self._connection.finish(_FAREWELL)
        up, down = self._transfer.bytes_sent, self._transfer.bytes_received
        seconds = time.monotonic() - started
        self._report(events.FederationFinished(rounds=spec.rounds, bytes_up=up, bytes_down=down, seconds=seconds))
        return self._model

    def close(self) -> None:
        self._worker.close()
        self._transfer.close()
        self._connection.close()

    # Events and messages

    def _handle(self, event: object) -> None:
        match event:
            case Delivery():
                self._receive(event)
                self._connection.mqtt.ack(event)
            case Contributed(progress):
                self._drop_old_blobs(progress)
                self._progress = progress
                self._timeline.end("training")
                self._timeline.begin("refining", progress.round)
                self._offer()
            case Refined(progress):
                self._progress, self._busy = progress, False
                self._timeline.end("refining")
                self._timeline.begin("waiting", progress.round + 1)
                self._report_metrics(progress)
                self._offer()
                self._proceed()
            case Deployed(path, lines, metrics):
                self._model = path
                if metrics:
                    self._send_metrics(self._spec.rounds, metrics)
                for line in lines:
                    self._note(line)
            case Failed(error):
                raise error
            case Fetched() | FetchFailed() | Damaged():
                self._handle_blob(event)
            case Connected() | Disconnected() | TakenOver():
                self._connection.observe(event)
                if isinstance(event, Connected):
                    self._announce()

    def _handle_blob(self, event: Fetched | FetchFailed | Damaged) -> None:
        match event:
            case Damaged():
                self._offer()  # which finds out
            case Fetched(manifest) | FetchFailed(manifest) if manifest != self._fetching:
                pass  # a newer round has begun meanwhile
            case Fetched(manifest):
                self._fetching = None
                self._timeline.end("receiving")
                self._report(events.Received(node=self._name, round=manifest.round, bytes=manifest.size))
                self._proceed()
            case FetchFailed(manifest, error):
                raise event.ours("then join again: the node goes on where it was") or EdgeNodeError(
                    f"the broadcast of round {manifest.round} did not arrive: {error}",
                    "check the coordinator's log and the broker's packet limits, then join again",
                ) from error

    def _announce(self) -> None:
        """Announce this node; what may have been lost is offered again once the coordinator has answered."""
        self._roll_called, self._announced = False, time.monotonic()
        self._connection.announce()
        known = self._worker.lost or self._progress
        self._connection.send(Hello(**self._connection.hello, round=known.round if known else 0))
        if self._is_served:
            self._connection.tell_finished()

    def _note_silence(self, waited: float) -> None:
        """Report once that no coordinator answers: what the broker retains may be all there is."""
        if not (self.is_admitted or self._silence_noted) and waited > _SILENCE:
            self._silence_noted = True
            self._note("the coordinator has not let us in so far; waiting for it")

    def _receive(self, delivery: Delivery) -> None:
        if not delivery.payload:
            return
        try:
            message = decode_any(delivery.payload)
        except DecodeError as error:
            self._note(f"ignored an unreadable message on {delivery.topic}: {error}")
            return
        self._dispatch(message, delivery.topic)

    def _dispatch(self, message: AnyMessage, topic: str) -> None:
        match message:
            case Refusal():
                self._check_run()
                self._connection.raise_refusal(message)
            case Accepted(session=session, run=run) if (session, run) == (self._session, self._spec.run):
                self._handle_accepted(message)
            case RoundState(run=run) if run != self._spec.run:
                self._check_run()
            case Spec():
                self._connection.observe_spec(message)
            case RoundState():
                self._handle_round_state(message)
            case Presence(online=True):
                self._roll_called = True  # it has come back, and may have missed messages
            case Presence():
                target = self._target
                if target is not None and target.status in ("gathering", "open"):
                    self._alone = True
                    self._note("the coordinator is not connected; waiting for it")
            case Welcome(session=session) if session == self._session:
                self.is_admitted, self._server = True, message.server
                if self._alone:
                    self._alone = False
                    self._note("the coordinator is back; going on")
                self._compare_progress(message)
                self._offer()
                self._proceed()
            case Welcome() | Accepted():
                pass  # nothing to do, or meant for an earlier process of this node
            case _:
                self._note(f"ignored an unexpected {type(message).__name__} on {topic}")

    @property
    def _target(self) -> RoundState | None:
        """The round state to reach: of the coordinator's process that has welcomed us, or else the newest.

        A run that was aborted is so for good, whoever says it.
        """
        aborted = [each for each in self._states.values() if each.status == "aborted"]
        if aborted or self._server in self._states:
            return aborted[0] if aborted else self._states[self._server]
        return max(self._states.values(), key=_order, default=None)

    def _compare_progress(self, welcome: Welcome) -> None:
        """Learn what the coordinator has of us: it, or we, may have been restored from a copy."""
        reached = self._progress.round if self._progress else 0
        if 0 < reached < welcome.contributed > self._contributed:
            self._note(
                f"the coordinator has this node's contribution to round {welcome.contributed}, and "
                f"{self._worker.folder} knows of round {reached}: it is an older copy. Going on from there; to lose "
                "nothing, stop this node, put the newer folder back, and join again"
            )
        self._contributed = welcome.contributed

    def _go_back(self, round_: int) -> None:
        """Go back to before a round: the coordinator has, or its broadcast is gone."""
        exact = self._worker.go_back(round_)
        if self._progress and self._progress.blob:
            self._transfer.withdraw(self._progress.blob.digest)
        self._progress = self._worker.progress
        self._accepted, self._counted = round_ - 1, min(self._counted, round_ - 1)
        if not exact:
            self._note(
                f"the state at the end of round {round_ - 1} is not kept any more: what this node alone has learnt is "
                "that of a later round"
            )

    def _handle_accepted(self, message: Accepted) -> None:
        progress, round_ = self._progress, message.round
        if message.counted:
            self._contributed = max(self._contributed, round_)
        if progress is None or progress.round != round_ or self._accepted >= round_:
            return
        self._accepted, blob = round_, progress.blob
        self._timeline.end("sending")
        if blob is not None:
            self._transfer.withdraw(blob.digest)
        size = blob.size if blob else 0
        if message.counted:
            self._counted = round_
            self._report(events.Contribution(node=self._name, round=round_, weight=progress.weight, bytes=size))
        else:
            self._report(events.Late(node=self._name, round=round_))
        self._proceed()  # it may have waited to know

    def _handle_round_state(self, target: RoundState) -> None:
        """Make the newest round state the one to reach."""
        before = self._states.get(target.server)
        if before is not None and _order(target) < _order(before):
            return  # it was delayed
        expected = broadcast_tensors(self._spec, target.round + (target.status == "finished"))
        promised, most = target.broadcast.size if target.broadcast else 0, encoded_size(expected)
        if promised > most:
            raise EdgeNodeError(
                f"the broadcast of round {target.round} promises {promised} bytes; {most} are the most",
                "somebody else writes to the federation's topics, or its coordinator is broken: ask its operator",
            )
        self._states[target.server] = target
        if target is not self._target:
            return  # of an earlier process of the coordinator, or of one that has not welcomed us so far
        if before is None:
            self._offer()
        if target.reason and target.status == "open" and (before is None or before.reason != target.reason):
            self._note(f"round {target.round} is {target.reason}")
        self._proceed()

    def _check_run(self) -> None:
        """Raise NewRunError if there is a newer run: what told of one may be old, and kept by the broker."""
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
            raise NewRunError("the coordinator has started a new run of this federation", "run edge-node join again")

    # Towards the newest round

    def _proceed(self) -> None:
        """Take the next step towards the newest round state; called whenever something has changed."""
        target = self._target
        if target is None or self._busy:
            return
        if target.status == "aborted":
            raise ended_early(target)
        if target.broadcast is None:
            return
        if self._progress and self._is_ahead_of(target):
            self._note(
                f"the coordinator is in round {target.round} again, and this node has been in round "
                f"{self._progress.round}: its state was restored from an older copy; going back with it"
            )
            self._go_back(max(1, target.round))
        if self._train_what_is_left(target):
            return
        if target.status == "finished":
            self._finish(target.broadcast)
            return
        if not self.is_admitted:
            return  # what is retained may be old or replayed; a coordinator that has answered is there now
        if target.round > self._rounds_done() and self._name in (target.participants or (self._name,)):
            if self._rounds.open_round != target.round:
                self._rounds.close([self._name])
                self._rounds.open(target.round, sums=is_statistics_round(self._spec, target.round))
            if not self._ensure_fetched(target.broadcast):
                return
            self._train(target.broadcast)

    def _train_what_is_left(self, target: RoundState) -> bool:
        """Train what is left: a round that was lost, or stage 2, in which a process was killed. Whether any is.

        Where nothing is, the open round's broadcast is looked at, and fetched again: the personal model needs it.
        """
        progress = self._progress
        left = self._worker.lost or (progress.broadcast if progress and self._rounds_done() < progress.round else None)
        if left is None and progress and target.broadcast and progress.broadcast.digest == target.broadcast.digest:
            return not self._ensure_fetched(target.broadcast)
        if left is None:
            return False
        if self._worker.store.is_intact(left.digest) or left == target.broadcast:
            if self._ensure_fetched(left):
                self._train(left)
            return True
        path = self._worker.store.path(left.digest)
        self._note(
            f"{path} is damaged, and the coordinator has it no more: round {left.round} is not trained to its end"
        )
        if self._worker.lost:
            self._worker.lost = None
        else:
            self._go_back(left.round)
        return False

    def _is_ahead_of(self, target: RoundState) -> bool:
        """Whether the coordinator that has welcomed us is behind us."""
        if self._progress is None or not self._server or target.server != self._server:
            return False
        return self._progress.round > target.round

    def _train(self, broadcast: Manifest) -> None:
        resuming = self._progress is not None and self._progress.round == broadcast.round
        self._timeline.end("waiting")
        self._timeline.begin("refining" if resuming else "training", broadcast.round)
        self._busy = True
        self._worker.train(broadcast)

    def _drop_old_blobs(self, reached: Progress) -> None:
        """Drop the blobs of the round before: stage 1 of the newest one is on disk."""
        if self._progress and self._progress.blob:
            self._transfer.withdraw(self._progress.blob.digest)
        self._worker.store.purge({each.digest for each in (reached.broadcast, reached.blob) if each})

    def _rounds_done(self) -> int:
        if self._progress is None:
            return 0
        return self._progress.round if self._progress.stage == "refined" else self._progress.round - 1

    def _ensure_fetched(self, manifest: Manifest) -> bool:
        """Whether a blob is here; if not, it is being fetched now."""
        if self._worker.store.is_intact(manifest.digest):
            return True
        self._worker.store.remove(manifest.digest)
        self._timeline.end("waiting")
        self._timeline.begin("receiving", manifest.round)
        if self._fetching is not None and self._fetching.digest != manifest.digest:
            self._transfer.cancel(self._fetching)
        self._fetching = manifest
        self._transfer.fetch(manifest)
        return False

    def _offer(self) -> None:
        """Offer the contribution to the open round, again if necessary: the coordinator counts it once."""
        progress, target = self._progress, self._target
        if progress is None or target is None or not self.is_admitted or target.server != self._server:
            return  # where the coordinator stands is not known yet
        is_lost = self._contributed < progress.round == target.round and target.status == "open"
        if target.round < progress.round or (progress.round <= self._accepted and not (is_lost and self._server)):
            return
        blob = progress.blob
        if target.round > progress.round and (blob is None or blob.digest not in self._worker.store):
            return  # a newer round has begun
        if blob is not None:
            blob = msgspec.structs.replace(blob, chunk_size=self._transfer.chunk_size(blob.chunk_size))
            is_wanted = self._contributed < progress.round == target.round
            if not self._transfer.offer(blob.digest, blob.chunk_size) and is_wanted:
                self._remake_contribution(progress)
                return
            self._timeline.begin("sending", blob.round)
            self._sent_before = self._transfer.bytes_sent
        statistics = is_statistics_round(self._spec, progress.round)
        self._connection.send(
            Contribution(
                session=self._session,
                run=progress.run,
                round=progress.round,
                weight=progress.weight,
                blob=blob,
                basis=basis(self._spec, progress.broadcast.digest) if statistics else "",
            )
        )
        self._offered = progress.round

    def _remake_contribution(self, progress: Progress) -> None:
        """Train the round again: its contribution was changed on the disk."""
        assert progress.blob is not None
        if self._busy:
            return  # it is looked at again then
        path = self._worker.store.path(progress.blob.digest)
        self._note(f"{path} is damaged: training round {progress.round} again")
        self._go_back(progress.round)
        self._worker.lost = progress.broadcast
        self._proceed()

    def _report_metrics(self, progress: Progress) -> None:
        metrics = {name: value for name, value in progress.history[-1].items() if name != "round"}
        if not metrics:
            return
        self._report(events.Measured(node=self._name, round=progress.round, metrics=metrics))
        self._notice.check(progress.round, {self._name: metrics})
        if self._telemetry:
            self._send_metrics(progress.round, metrics)

    def _send_metrics(self, round_: int, metrics: Mapping[str, float]) -> None:
        self._connection.send(Telemetry(session=self._session, run=self._spec.run, round=round_, metrics=dict(metrics)))

    def _finish(self, final: Manifest) -> None:
        is_newcomer = self._progress is None
        if is_newcomer and not self._spec.statistics:
            raise EdgeNodeError(
                "the federation ended before this node trained a round", "join the next one from its start"
            )
        if is_newcomer and not self.is_admitted:
            return
        counted = self._is_counted(self._progress) if self._progress else False
        if self._spec.statistics and counted is None:
            return  # the coordinator is about to say it
        if not self._worker.needs_final or self._ensure_fetched(final):
            self._timeline.end("waiting")
            self._rounds.close([self._name])
            if self._worker.previews:
                self._note("all sums are here; leaving out this plant's images, one after the other")
            elif self._has_images:
                self._note("the federation has finished; comparing its model with training alone")
            if self._progress and self._worker.lacks_broadcast:
                path = self._worker.store.path(self._progress.broadcast.digest)
                self._note(
                    f"{path} is damaged, and the coordinator has it no more: the model is made with the result of the "
                    "last round in its place"
                )
            if is_newcomer:  # it trains alone for minutes, in which nobody need wait for it
                self._is_served = True
                self._connection.tell_finished()
            self._busy = True
            self._worker.deploy(final, counted=bool(counted))

    def _is_counted(self, progress: Progress) -> bool | None:
        """Whether the run's result holds this node's part of the last round; None if that is not known yet."""
        if progress.round < self._spec.rounds:
            return False
        return self._counted == progress.round if self._accepted == progress.round else progress.counted

    # Reports

    def _note(self, text: str) -> None:
        self._report(events.Note(text=text))

    def _activity(self) -> events.Activity:
        """What the node does now: sending, while it also trains stage 2, since others wait for the upload."""
        target, progress = self._target, self._progress
        done = total = 0
        what: events.ActivityKind = "waiting"
        if target is None or target.broadcast is None:
            pass
        elif progress and self._offered > self._accepted:
            what = "sending"
            if progress.blob:
                total = progress.blob.size
                done = min(total, self._transfer.bytes_sent - self._sent_before)
        elif self._busy:
            over = target.status == "finished" and (progress is None or progress.stage == "refined")
            what = "judging" if over else "training"
            if over:
                done, total = self._worker.alone.rounds_done, self._worker.alone.rounds
        elif target.broadcast.digest not in self._worker.store:
            what, total = "receiving", target.broadcast.size
            done = self._transfer.received(target.broadcast.digest)
        round_ = self._rounds.open_round or self._rounds_done()
        return events.Activity(node=self._name, round=round_, what=what, done=done, total=total)


def _order(state: RoundState) -> tuple[int, int]:
    """The order in which round states of a run are published."""
    return state.round, _STAGES.index(state.status)
