"""Session of one sensor: it embeds what it measures, and trains with what the head sends back."""

import contextlib
import queue
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from broker_config.mqtt.client import Connected, Delivery, Disconnected, TakenOver
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.event_queue import EventQueue
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.frames import LARGEST_FRAME, Graded, Opened, Represented, decode_frame
from broker_config.protocol.messages import Finished, Message, Presence, Refusal, RoundState, Welcome
from broker_config.protocol.vfl_messages import VflHello, VflSpec
from broker_config.storage import disk
from edge.terminal.formatting import pluralize
from edge.vfl.sensor_rows import RowFile
from trainer import progress
from trainer.federation.client import checkpoint
from trainer.federation.client.connection import ClientConnection
from trainer.federation.presence import await_room
from trainer.vfl.client.local_round import LocalRound, is_skipped
from trainer.vfl.client.sensor_trainer import Deploy, SensorTrainer
from trainer.vfl.client.target_round import MissingRows, TargetRound, check_frame, is_newer, positions_to_keep
from trainer.vfl.privacy import describe_spent
from trainer.vfl.process_setup import EVENT_QUEUE, set_up_process

_TICK = 0.2  # seconds
_LOOK = 0.02  # seconds between two looks for new rows
_ALONE = 10.0  # seconds for a head that asks for more rounds
_CALM = 0.2  # seconds between two VflHello
_FAREWELL = 10.0  # seconds for the head to learn that we have written down the last round


class NewRunError(EdgeNodeError):
    """The head has begun another run before this sensor had learnt anything in the one that it was in."""

    def __init__(self, run: str):
        super().__init__("the head has started a new run", "run edge-node vfl join again")
        self.run = run


def take_part(
    spec: VflSpec,
    name: str,
    rows: RowFile,
    endpoint: Endpoint,
    folder: Path,
    *,
    report: progress.Report,
    stop: Callable[[], bool] = lambda: False,
    deploying: Callable[[], Deploy] = lambda: lambda *_, **__: None,
) -> tuple[int, bool]:
    """Take part until the run ends; return the last round trained on, and whether the run has ended.

    Raises:
        NewRunError: it is to take part in that one.
        EdgeNodeError: with what to do about it.
    """
    set_up_process(spec.threads)
    with disk.lock_folder(folder):
        checkpoint.keep_spec(folder, spec)
        sensor = _Sensor(spec, name, rows, endpoint, folder, report, deploying())
        try:
            return sensor.run(stop)
        finally:
            sensor.close()


class _Sensor:
    def __init__(
        self,
        spec: VflSpec,
        name: str,
        rows: RowFile,
        endpoint: Endpoint,
        folder: Path,
        report: progress.Report,
        deploy: Deploy,
    ):
        self._spec, self._name, self._report = spec, name, report
        self._me = checkpoint.begin_session(folder)
        self._trainer = SensorTrainer(spec, name, rows, folder, self._note, deploy)
        self._attempt = -1
        self._target: TargetRound | None = None
        self._open: LocalRound | None = None
        self._lacking = MissingRows(spec.patience / 2)
        self._told_lacking: Set[str] = frozenset()  # products
        self._lacks = ""  # what the open round waits for, in words
        self._end: int | None = None  # the last round, once the head has said that it is over
        self._welcome = False
        self._alone = False  # the head was said to be away
        self._played, self._began = 0, time.monotonic()  # the last round, as retained
        self._ignored: set[str] = set()  # topics
        self._call = False  # whether the head is to be told how far we are
        self._called, self._told, self._told_round = -_CALM, time.monotonic(), self.round

        self._inbox = EventQueue(EVENT_QUEUE)
        self._connection = ClientConnection(
            endpoint, spec, name, self._me, self._inbox, report, server="head", persistent=False
        )
        self._mqtt = self._connection.mqtt
        self._mqtt.max_payload = LARGEST_FRAME

    @property
    def round(self) -> int:
        """The last one that was learnt from."""
        return self._trainer.round

    def run(self, stop: Callable[[], bool]) -> tuple[int, bool]:
        federation, name = self._spec.federation, self._name
        frames = (topics.opened(federation), topics.representation(federation), topics.gradients(federation, name))
        self._mqtt.subscribe(*frames, qos=0)
        samples = self._trainer.samples
        samples.refresh()
        if not samples.count:
            self._note(f"waiting for rows in {self._trainer.rows.path}")
        if not await_room(self._mqtt.open, self._report, stop):
            return self.round, False
        self._note(f"taking part in federation {federation!r} as {name}, from round {self.round + 1} on")
        self._report_privacy()
        while self._end is None or self.round < self._end:
            if stop():
                return self.round, False
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=self._poll_interval()))
            if self._inbox.empty():
                self._continue_round()
        self._trainer.commit(last=True)
        self._connection.finish(_FAREWELL)
        self._note(f"finished: {pluralize(self.round, 'round')}")
        return self.round, True

    def close(self) -> None:
        self._report_privacy()
        self._connection.close()

    def _poll_interval(self) -> float:
        return _LOOK if self._call or (self._target and self._open is None) else _TICK

    # What arrives

    def _handle(self, event: object) -> None:
        match event:
            case Delivery(topic=topic, payload=payload):
                try:
                    self._receive(topic, payload)
                except (DecodeError, ValueError) as error:
                    self._call |= self._open is not None  # it may have been the answer
                    if topic not in self._ignored:
                        self._ignored.add(topic)
                        self._note(f"ignored a message on {topic}, and will others like it: {error}")
            case Connected():
                self._connection.observe(event)
                self._connection.announce()
                self._call = True
            case Disconnected() | TakenOver():
                self._connection.observe(event)

    def _receive(self, topic: str, payload: bytes) -> None:
        if not payload:
            return
        federation = self._spec.federation
        if topic in (topics.opened(federation), topics.representation(federation)) or topic.endswith("/gradients"):
            frame = decode_frame(payload)
            if not isinstance(frame, Opened | Represented | Graded):
                raise ValueError(f"a {type(frame).__name__}")
            if frame.run == self._spec.run:
                self._handle_frame(frame)
            return
        match message := decode(payload, Message):
            case Refusal():
                self._connection.raise_refusal(message)
            case Welcome(session=session) if session == self._me.session:
                self._welcome = True
                if self._alone:
                    self._alone = False
                    self._note(f"the head is back; the next round is {self.round + 1}")
            case VflSpec():
                self._handle_spec(message)
            case Presence(online=True):
                self._call = True
            case Presence():
                self._alone = True
                self._note("the head is not connected; waiting for it")
            case RoundState(status="finished", run=run, round=round_) if run == self._spec.run:
                self._played, self._call = round_, True  # it may be an old one: the head is to say so to us
            case Finished(session=session) if session == self._me.session:
                self._end = self.round

    def _handle_spec(self, spec: VflSpec) -> None:
        """One of another run: a head that has begun it refuses us; if it is older, it has only been said again."""
        if spec.run == self._spec.run:
            self._connection.observe_spec(spec)
            return
        if not self.round:
            raise NewRunError(spec.run)
        if self._name not in spec.sensors:
            raise EdgeNodeError("the head has started a new run", "run edge-node vfl join again")
        self._call = True

    def _end_alone(self) -> None:
        """After the last round, wait only a while for a head that asks for more rounds."""
        over = self._alone and not self._welcome and 0 < self._played <= self.round
        if over and time.monotonic() - self._began > _ALONE:
            self._note(f"all {self._played} rounds are played")
            self._end = self.round

    def _handle_frame(self, frame: Opened | Represented | Graded) -> None:
        check_frame(frame, self._spec, self._trainer.product_bytes)
        match frame:
            case Opened():
                if is_newer(frame, self._attempt, self.round):
                    self._trainer.positions.put(frame.since, frame.products, positions_to_keep(self._spec, frame.round))
                    if frame.part == frame.parts - 1:
                        self._set_target(frame)
            case Represented() | Graded() if frame.attempt == self._attempt:
                if self._target and self._target.frame.round == frame.round:
                    if self._spec.absent != "wait" and is_skipped(frame, self._trainer.sensor.index):
                        self._target = None
                        self._advance(frame.round)
                        return
                    self._embed(self._target)  # the round is over at the head, and brought after us
                if self._open and self._open.round == frame.round and self._open.put(frame):
                    self._train(self._open)

    def _set_target(self, frame: Opened) -> None:
        """Work towards a round that has opened, if the model is where that begins."""
        if frame.attempt > self._attempt:
            self._open = self._target = None
            if not self._trainer.rewind(frame.round - 1):
                self._call = True
                return
        self._attempt = frame.attempt
        if frame.round > self.round + 1:
            if self._spec.absent == "wait":
                self._call = True  # what the head has sent in between was lost
                return
            self._trainer.round, self._open = frame.round - 1, None
        if self._open and self._open.round == frame.round:
            self._send(self._open)  # we are asked again: something was lost
        else:
            again = self._target is not None and self._target.frame.round == frame.round  # it waits since then
            self._target = (
                self._target._replace(frame=frame) if self._target and again else TargetRound(frame, time.monotonic())
            )

    # Towards the end of the round

    def _continue_round(self) -> None:
        """Do what is to be done next; called when nothing more has arrived."""
        self._end_alone()
        if self._call and time.monotonic() - self._called > _CALM:
            self._hello()
        if self._target and self._open is None:
            self._embed(self._target)

    def _hello(self) -> None:
        self._call, self._called = False, time.monotonic()
        hello = VflHello(
            **self._connection.hello,
            columns=self._trainer.samples.columns,
            round=self.round,
            kept=self._trainer.kept,
            lacks=self._lacks,
        )
        self._connection.send(hello)

    def _embed(self, target: TargetRound) -> None:
        """Send the embeddings of a round, once its samples are there, or cannot be waited for any longer."""
        training, (frame, since, late) = self._trainer, target
        products = training.positions.get(frame.first, frame.last)
        if products is None:
            self._target, self._call = None, True
            return
        taken = None
        if not late or training.samples.refresh():  # else what is late still is
            taken = training.get_samples(products)
            late = frozenset(products[row] for row in taken[1])
            self._target = target._replace(late=late)
        if self._waits(products, late, since):
            return
        taken = taken or training.get_samples(products)
        session = self._me.session
        self._open = training.start_round(frame, products, taken, since=since, session=session, attempt=self._attempt)
        self._target, self._lacks = None, ""
        self._send(self._open)

    def _waits(self, products: Sequence[str], lacking: Set[str], since: float) -> bool:
        """Whether a round is to wait for rows that are lacking; when that takes long it is said which."""
        now = time.monotonic()
        if self._spec.absent != "wait":
            return self._lacking.should_wait(products, lacking, now - since, now)
        if lacking - self._told_lacking and now - since > self._spec.patience:
            self._told_lacking = lacking
            self._lacks, self._call = (
                self._trainer.describe_missing([each for each in products if each in lacking]),
                True,
            )
            self._note(f"{self._name} lacks {self._lacks}; the round waits for it")
        return bool(lacking)

    def _send(self, local: LocalRound) -> None:
        for payload in local.sent:
            self._mqtt.publish(topics.embeddings(self._spec.federation, self._name), payload, qos=0)

    def _train(self, local: LocalRound) -> None:
        self._trainer.train(local)
        self._open = None
        self._advance(local.round)

    def _advance(self, round_: int) -> None:
        """A round is over."""
        self._call |= round_ == self._played
        self._trainer.finish_round(round_)
        self._progress()

    # What is told about it

    def _progress(self) -> None:
        """Once a second: rounds may be many."""
        now = time.monotonic()
        if now - self._told >= 1.0:
            rate = (self.round - self._told_round) / max(now - self._told, 1e-3)
            self._report(progress.Learning(node=self._name, round=self.round, rate=max(0.0, rate)))
            self._told, self._told_round = now, self.round

    def _report_privacy(self) -> None:
        if text := describe_spent(self._spec, self.round):
            self._note(text)

    def _note(self, text: str) -> None:
        self._report(progress.Note(text=text))
