"""Service of the head: prediction of each product from the embeddings that have arrived,
and again when more have.
"""

import logging
import queue
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field

from broker_config.mqtt.client import Delivery, MqttClient, TakenOver
from broker_config.mqtt.collision import another_process
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError
from broker_config.protocol.errors import BrokerError, abbreviate
from broker_config.storage import disk
from edge.sinks.append_file import write_all
from edge.terminal.formatting import pluralize
from edge_node.extensions.vfl import topics as vfl_topics
from edge_node.extensions.vfl.frames import LARGEST_FRAME, Embedded, decode_frame
from edge_node.extensions.vfl.line.bundle_reload import BundleReloader, NewModel
from edge_node.extensions.vfl.line.party_model import HeadModel
from edge_node.extensions.vfl.line.product_embeddings import (
    Answer,
    DuePrediction,
    EmbeddingCollector,
    SensorEmbedding,
)

_log = logging.getLogger(__name__)

_IDLE = 0.2  # seconds between two checks of `stop`
_INBOX = 10_000  # messages
_AT_ONCE = 1000  # messages that are taken before predictions are made
_KEPT = 5  # models: sensors' embeddings may be of another round than the newest
_DRAIN = 5.0  # seconds to send what is left at the end

_encode = msgspec.json.Encoder().encode


class Prediction(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head's prediction of a product: a JSON object on `vfl_topics.predictions`."""

    time: str  # ISO 8601, UTC
    product: str
    answer: Answer
    class_: str = field(name="class")  # the likeliest
    probability: float  # of that class
    expectation: float | None = None  # mean of the classes, where they are numbers
    present: tuple[str, ...]  # sensors that have reported
    absent: tuple[str, ...]
    latency_ms: float  # since the newest embedding came
    run: str
    round: int  # of the head's model
    rounds: tuple[int, ...]  # of the models that made the embeddings, in the order of `present`


class _Answered(Struct, frozen=True):
    """What a service leaves to the next one: products that had their final prediction,
    and of which sensors.
    """

    run: str
    products: dict[str, tuple[str, ...]]


class _Inbox(queue.Queue[Any]):
    """A queue that notes when each thing came, in seconds of the monotonic clock."""

    def _put(self, item: Any) -> None:
        super()._put((time.monotonic(), item))


def serve_head(
    bundle: Path,
    load: Callable[[Path], HeadModel],
    endpoint: Endpoint,
    memory: Path,
    output: Path | None,
    deadline: float,
    stop: Callable[[], bool],
) -> int:
    """Serve until `stop`; return how many products had their final prediction.

    A product's is final when all sensors have reported, or `deadline` seconds after the first one
    did. Final predictions are appended to `output`, too. At the end, open products get theirs at
    once, and the folder `memory` is told which had theirs: the next service gives them no other.

    Raises:
        EdgeNodeError: the bundle or the broker cannot be used at the start, `memory` cannot be
            written, or another process serves as the head.
    """
    inbox = _Inbox(_INBOX)
    reloader = BundleReloader(bundle, load, inbox)
    model = reloader.load_first()
    federation = model.manifest.federation
    client = f"edge-node/{federation}/{topics.COORDINATOR}/predict"
    mqtt = MqttClient(endpoint, client, inbox=inbox, persistent=True)
    mqtt.max_payload = LARGEST_FRAME
    mqtt.subscribe(vfl_topics.products(federation, "+"))
    with mqtt, reloader:
        answered = memory / f"{federation}-answered.json"
        service = _Service(
            model, mqtt, output, deadline, _read_answered(answered, model.manifest.run)
        )
        mqtt.await_subscription(_DRAIN)
        sys.stderr.write(f"ready head, round {model.manifest.round}\n")
        while not stop():
            service.handle_events(inbox)
        service.finish()
        mqtt.flush(_DRAIN)
    with disk.writing(memory):
        memory.mkdir(parents=True, exist_ok=True)
        disk.replace_bytes(answered, _encode(service.answered))
    sys.stderr.write(f"stopped head: {pluralize(service.final, 'product')} predicted\n")
    return service.final


class _Service:
    def __init__(
        self,
        model: HeadModel,
        mqtt: MqttClient,
        output: Path | None,
        deadline: float,
        closed: Mapping[str, tuple[str, ...]],
    ):
        self.final = 0
        self._mqtt = mqtt
        self._output = output
        self._deadline = deadline
        self._models = deque([model], _KEPT)
        self._collector = EmbeddingCollector(model.manifest.sensors, deadline, closed=closed)
        self._topic = vfl_topics.predictions(model.manifest.federation)
        self._discarded: Counter[tuple[str, str]] = Counter()  # by sensor and reason
        self._unwritten = False  # whether the file could not be written last time
        self._unpublished = 0  # predictions

    def handle_events(self, inbox: _Inbox) -> None:
        """Take what has come, at least one message if one comes soon; then predict what is due."""
        wait = self._collector.next_deadline()
        patience = _IDLE if wait is None else min(_IDLE, max(0.0, wait - time.monotonic()))
        taken: list[Delivery] = []
        try:
            at, event = inbox.get(timeout=patience)
            while True:
                self._handle(at, event, taken)
                if len(taken) >= _AT_ONCE:
                    break
                at, event = inbox.get_nowait()
        except queue.Empty:
            pass
        self._answer(self._collector.take_due(time.monotonic()))
        for delivery in taken:
            self._mqtt.ack(delivery)

    def finish(self) -> None:
        """Answer what is open, and say what was left out."""
        self._answer(self._collector.close_all())
        for (sensor, reason), count in self._discarded.items():
            _log.warning("left out %d messages of %s: %s", count, sensor, reason)
        if self._unpublished:
            _log.warning("%s not published", pluralize(self._unpublished, "prediction"))

    @property
    def answered(self) -> _Answered:
        """State to hand over to the next service."""
        return _Answered(self._models[-1].manifest.run, self._collector.closed)

    def _handle(self, at: float, event: object, taken: list[Delivery]) -> None:
        match event:
            case Delivery():
                taken.append(event)
                sensor = abbreviate(topics.sender(event.topic), 64)
                if (
                    reason := self._add_embedding(sensor, event.payload, at)
                ) and not event.repeated:
                    self._discard(sensor, reason)
            case NewModel(model):
                self._swap_model(model)
            case TakenOver():
                raise another_process("the head")

    def _add_embedding(self, sensor: str, payload: bytes, at: float) -> str | None:
        """Take an embedding; or say why not."""
        try:
            frame = decode_frame(payload)
        except DecodeError:
            return "unreadable"
        if not isinstance(frame, Embedded) or len(frame.embedding) % 4:
            return "no embedding"
        if frame.run != self._models[-1].manifest.run:
            return "of another run"
        part = SensorEmbedding(np.frombuffer(frame.embedding, "<f4"), frame.round, at)
        return self._collector.add(sensor, frame.product, part)

    def _discard(self, sensor: str, reason: str) -> None:
        """The first is told at once, all are counted;
        strangers cannot fill the memory with names.
        """
        if len(self._discarded) < 1000 and (sensor, reason) not in self._discarded:
            _log.warning("left out a message of %s: %s; others like it are counted", sensor, reason)
            self._discarded[sensor, reason] = 0
        if (sensor, reason) in self._discarded:
            self._discarded[sensor, reason] += 1

    def _swap_model(self, model: HeadModel) -> None:
        """Take up a newer model; one of another run or of other sensors ends what is open first."""
        before = self._models[-1].manifest
        if (before.run, before.sensors) != (model.manifest.run, model.manifest.sensors):
            self._answer(self._collector.close_all())
            self._models.clear()
            self._collector = EmbeddingCollector(model.manifest.sensors, self._deadline)
        self._models.append(model)
        sys.stderr.write(f"now with the model of round {model.manifest.round}\n")

    def _answer(self, due: Sequence[DuePrediction]) -> None:
        """Predict, all products of a model at once, and publish."""
        for index, group in groupby(sorted(due, key=self._nearest), self._nearest):
            batch = list(group)
            for start in range(0, len(batch), _AT_ONCE):
                self._publish(
                    list(make_predictions(self._models[index], batch[start : start + _AT_ONCE]))
                )

    def _nearest(self, due: DuePrediction) -> int:
        """Which model is nearest to the rounds of its embeddings; the newest of several."""
        rounds = [part.round for part in due.parts.values()]
        far = []
        for each in self._models:
            far.append(sum(abs(each.manifest.round - round_) for round_ in rounds))
        return max(range(len(far)), key=lambda index: (-far[index], index))

    def _publish(self, made: Sequence[Prediction]) -> None:
        final = [each for each in made if each.answer == "final"]
        for each in made:
            sure = each.answer == "final"
            try:
                self._mqtt.publish(self._topic, _encode(each), qos=int(sure), retain=sure)
            except BrokerError:
                self._count_unpublished()
        self.final += len(final)
        if self._output and final:
            self._write(self._output, b"".join(_encode(each) + b"\n" for each in final))

    def _count_unpublished(self) -> None:
        if not self._unpublished:
            kept = f"; all are in {self._output}" if self._output else ""
            _log.warning(
                "predictions come faster than the broker takes them, and some are not published%s",
                kept,
            )
        self._unpublished += 1

    def _write(self, path: Path, lines: bytes) -> None:
        """Opened each time, so that the file can be moved away; a fault is told when it begins."""
        try:
            with path.open("ab", buffering=0) as file:
                write_all(file, lines)
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                _log.warning("predictions are not written to %s: %s", path, error.strerror)
            self._unwritten = True


def _read_answered(path: Path, run: str) -> dict[str, tuple[str, ...]]:
    """What the previous service has answered; nothing if it was of another run,
    or is unreadable.
    """
    try:
        before = msgspec.json.decode(disk.read_regular(path), type=_Answered)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return before.products if before.run == run else {}


def make_predictions(model: HeadModel, due: Sequence[DuePrediction]) -> Iterator[Prediction]:
    """Predictions of one model for a batch of products."""
    manifest = model.manifest
    names = [each.name for each in manifest.sensors]
    collected_names = []
    for one in due:
        collected_names.append([name in one.parts for name in names])
    present = np.array(collected_names)
    embeddings = [np.zeros((len(due), each.size), np.float32) for each in manifest.sensors]
    for row, each in enumerate(due):
        for sensor, name in enumerate(names):
            if name in each.parts:
                embeddings[sensor][row] = each.parts[name].embedding
    made = model.predict(embeddings, present)
    best = made.probabilities.argmax(1)
    now = time.monotonic()
    stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
    for row, each in enumerate(due):
        reported = tuple(name for name in names if name in each.parts)
        expectation = None if made.expectation is None else round(float(made.expectation[row]), 6)
        yield Prediction(
            time=stamp,
            product=each.product,
            answer=each.answer,
            class_=manifest.classes[best[row]],
            probability=round(float(made.probabilities[row, best[row]]), 6),
            expectation=expectation,
            present=reported,
            absent=tuple(name for name in names if name not in each.parts),
            latency_ms=round(1000 * (now - max(part.at for part in each.parts.values())), 3),
            run=manifest.run,
            round=manifest.round,
            rounds=tuple(each.parts[name].round for name in reported),
        )
