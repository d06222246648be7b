"""Session of one sensor: it embeds what it measures, and trains with what the head sends back."""

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from broker_config.mqtt.client import Connected, Delivery, Disconnected, TakenOver
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.event_queue import EventQueue
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import REVISION, Message, Refusal
from broker_config.storage import disk
from edge.terminal.formatting import pluralize
from edge_node.extensions.vfl import topics as vfl_topics
from edge_node.extensions.vfl.client.local_round import LocalRound
from edge_node.extensions.vfl.client.sensor_trainer import Deploy, SensorTrainer, Taken
from edge_node.extensions.vfl.client.session_state import (
    HEAD_WAIT,
    Answer,
    CannotRewind,
    Described,
    DescribeMissing,
    Effect,
    Embed,
    Event,
    Fail,
    FinishRound,
    Idle,
    KeepProducts,
    Learn,
    Learnt,
    NewRunError,
    Online,
    ProductsUnknown,
    Question,
    ReadRows,
    Replied,
    Report,
    Rewind,
    Rewound,
    RoundOpened,
    RowsRead,
    SayHello,
    Send,
    SkipTo,
    Told,
    Unusable,
    advance,
    start,
)
from edge_node.extensions.vfl.client.target_round import check_frame, positions_to_keep
from edge_node.extensions.vfl.frames import LARGEST_FRAME, Graded, Opened, Represented, decode_frame
from edge_node.extensions.vfl.line.sensor_rows import RowFile
from edge_node.extensions.vfl.messages import VflHello, VflSpec
from edge_node.extensions.vfl.privacy import open_protection, predates_binding
from edge_node.extensions.vfl.process_setup import EVENT_QUEUE, set_up_process
from edge_node.extensions.vfl.server.spec import check_combinations
from trainer import progress
from trainer.federation.client import checkpoint
from trainer.federation.client.connection import ClientConnection
from trainer.federation.presence import await_broker

_TICK = 0.2  # seconds
_LOOK = 0.02  # seconds between two looks for new rows
_FAREWELL = 10.0  # seconds for the head to learn that we have written down the last round


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
    head_wait: float = HEAD_WAIT,
) -> tuple[int, bool]:
    """Take part until the run ends; return the last round trained on,
    and whether the run has ended.

    Where all rounds are played, `head_wait` is how many seconds a head has to ask for more.

    Raises:
        NewRunError: it is to take part in that one (`session_state`).
        UsageError: a protected run began with an earlier version.
        EdgeNodeError: with what to do about it.
    """
    check_combinations(spec)
    if predates_binding(spec):
        raise UsageError(
            f"run {spec.run} of federation {spec.federation!r} began with an earlier version of "
            "edge-node, whose noise could hide two embeddings",
            "ask its operator to begin another one with this version (edge-node vfl coordinate "
            "--new)",
        )
    set_up_process(spec.threads)
    with disk.lock_folder(folder):
        is_known = checkpoint.check_known(folder, spec)
        open_protection(folder, spec, is_known=is_known)
        checkpoint.keep_spec(folder, spec)
        sensor = _Sensor(spec, name, rows, endpoint, folder, report, deploying(), head_wait)
        try:
            return sensor.run(stop)
        finally:
            sensor.close()


class _Sensor:
    """Broker, clock and model around the session's state."""

    def __init__(
        self,
        spec: VflSpec,
        name: str,
        rows: RowFile,
        endpoint: Endpoint,
        folder: Path,
        report: progress.Report,
        deploy: Deploy,
        head_wait: float,
    ):
        self._spec = spec
        self._name = name
        self._report = report
        self._me = checkpoint.begin_session(folder)
        self._trainer = SensorTrainer(spec, name, rows, folder, self._note, deploy)
        self._state = start(
            spec, name, self._me.session, self._trainer.round, time.monotonic(), head_wait
        )
        self._taken: Taken | None = None  # the samples that were read last
        self._local: LocalRound | None = None  # the round whose embeddings are sent
        self._inbox = EventQueue(EVENT_QUEUE)
        self._connection = ClientConnection(
            endpoint, spec, name, self._me, self._inbox, report, server="head", persistent=False
        )
        self._mqtt = self._connection.mqtt
        self._mqtt.max_payload = LARGEST_FRAME
        self._broadcasts = (
            vfl_topics.opened(spec.federation),
            vfl_topics.representation(spec.federation),
        )
        self._gradients = vfl_topics.gradients(spec.federation, name)

    def run(self, stop: Callable[[], bool]) -> tuple[int, bool]:
        self._mqtt.subscribe(*self._broadcasts, self._gradients, qos=0)
        samples = self._trainer.samples
        samples.refresh()
        if not samples.count:
            self._note(f"waiting for rows in {self._trainer.rows.path}")
        if not await_broker(self._mqtt.open, self._report, stop):
            return self._state.round, False
        federation = self._spec.federation
        name = self._name
        self._note(
            f"taking part in federation {federation!r} as {name}, from round "
            f"{self._state.round + 1} on"
        )
        self._report_privacy()
        while not self._state.over:
            if stop():
                self._deploy(last=True)
                return self._state.round, False
            with contextlib.suppress(queue.Empty):
                timeout = _LOOK if self._state.is_polling else _TICK
                self._handle(self._inbox.get(timeout=timeout))
            if self._inbox.empty():
                self._feed(Idle(time.monotonic()))
                self._deploy(last=False)
        self._trainer.commit()
        self._trainer.deploy(last=True)
        self._connection.finish(_FAREWELL)
        self._note(f"finished: {pluralize(self._state.round, 'round')}")
        return self._state.round, True

    def close(self) -> None:
        self._report_privacy()
        self._connection.close()

    def _deploy(self, *, last: bool) -> None:
        """Where nothing is learnt yet there is a bundle already, which may be a newer one."""
        if self._trainer.has_learnt:
            self._trainer.deploy(last=last)

    # Events

    def _handle(self, event: object) -> None:
        match event:
            case Delivery(topic=topic, payload=payload) if payload:
                try:
                    self._receive(topic, payload)
                except (DecodeError, ValueError) as error:
                    self._feed(Unusable(topic, str(error)))
            case Connected():
                self._connection.observe(event)
                self._connection.announce()
                self._feed(Online())
            case Disconnected() | TakenOver():
                self._connection.observe(event)

    def _receive(self, topic: str, payload: bytes) -> None:
        """Act on a message; DecodeError or ValueError if it cannot be meant."""
        if topic in self._broadcasts or topic == self._gradients:
            frame = decode_frame(payload)
            if not isinstance(frame, Opened | Represented | Graded):
                raise ValueError(f"a {type(frame).__name__}")
            if frame.run == self._spec.run:
                check_frame(frame, self._spec, self._trainer.product_bytes)
                now = time.monotonic()
                event = (
                    RoundOpened(frame, now) if isinstance(frame, Opened) else Replied(frame, now)
                )
                self._feed(event)
            return
        match message := decode(payload, Message):
            case Refusal(session=session):
                if session == self._me.session and self._state.takes_other_run:
                    raise NewRunError(self._state.other_run)
                self._connection.raise_refusal(message)
            case VflSpec():
                self._connection.observe_spec(message)
        self._feed(Told(message))

    def _feed(self, event: Event) -> None:
        """Advance by an event, and by what its effects are answered with."""
        events = deque([event])
        while events:
            self._state, effects = advance(self._state, events.popleft())
            for effect in effects:
                if not isinstance(effect, Question):
                    self._perform(effect)
                elif (answer := self._answer(effect)) is not None:
                    events.append(answer)

    # Effects

    def _answer(self, question: Question) -> Answer | None:
        """Perform it; what has come of it, or None if that is yet to come."""
        training = self._trainer
        match question:
            case ReadRows():
                return self._read_rows(question)
            case Learn(frame):
                assert self._local
                if not self._local.put(frame):
                    return None
                training.train(self._local)
                self._local = None
                return Learnt(time.monotonic())
            case Rewind(frame):
                self._local = None
                there = training.rewind(frame.round - 1)
                return Rewound(frame, training.round, time.monotonic()) if there else CannotRewind()
            case DescribeMissing(products):
                return Described(training.describe_missing(products))

    def _read_rows(self, asked: ReadRows) -> Answer:
        training = self._trainer
        late = asked.late
        self._taken = None
        products = training.positions.get(asked.frame.first, asked.frame.last)
        if products is None:
            return ProductsUnknown()
        if not late or training.samples.refresh():  # else what is late still is
            self._taken = training.get_samples(products)
            late = frozenset(products[row] for row in self._taken[1])
        if late and self._spec.absent != "wait" and training.has_passed(products):
            late = frozenset()
        return RowsRead(products, late, asked.reply, time.monotonic())

    def _perform(self, effect: Effect) -> None:
        training = self._trainer
        match effect:
            case Embed(frame, products, since):
                taken = self._taken or training.get_samples(products)
                self._taken = None
                self._local = training.start_round(
                    frame,
                    products,
                    taken,
                    since=since,
                    session=self._me.session,
                    attempt=frame.attempt,
                )
            case Send():
                assert self._local
                for payload in self._local.sent:
                    self._mqtt.publish(
                        vfl_topics.embeddings(self._spec.federation, self._name), payload, qos=0
                    )
            case FinishRound(round_):
                training.finish_round(round_)
            case KeepProducts(frame):
                kept = positions_to_keep(self._spec, frame.round)
                training.positions.put(frame.since, frame.products, kept)
            case SayHello(round_, lacks):
                columns = training.samples.columns
                kept_ = training.kept
                hello = VflHello(
                    **self._connection.hello,
                    columns=columns,
                    round=round_,
                    kept=kept_,
                    lacks=lacks,
                    revision=REVISION,
                )
                self._connection.send(hello)
            case SkipTo(round_):
                training.round = round_
                self._local = None
            case Report(event):
                self._report(event)
            case Fail(error):
                raise error

    # What is told about it

    def _report_privacy(self) -> None:
        if text := self._trainer.describe_spent(self._state.round):
            self._note(text)

    def _note(self, text: str) -> None:
        self._report(progress.Note(text=text))
