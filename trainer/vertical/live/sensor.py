"""One sensor's session in a line: it embeds what it measures, and learns from what the head sends back."""

import contextlib
import gc
import importlib.metadata
import queue
import secrets
import sys
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from broker_config import disk, topics
from broker_config.codec import DecodeError, decode, encode
from broker_config.endpoint import Endpoint
from broker_config.errors import EdgeNodeError, UsageError, brief
from broker_config.frames import LARGEST_FRAME, AnyFrame, Graded, Opened, Represented, decode_frame, encode_frame
from broker_config.link import TAKEN_OVER, Delivery, Link, LinkDown, LinkUp
from broker_config.messages import Finished, Message, Presence, Refusal, RoundState, Welcome
from broker_config.vertical import LineHello, LineSpec
from edge.vertical.rows import Samples, Scaling
from edge.words import some
from trainer import progress, standing
from trainer.vertical.channel import Extent
from trainer.vertical.live import packing
from trainer.vertical.live.checkpoint import Checkpoints, under
from trainer.vertical.live.goal import Lacking, Positions, is_newer
from trainer.vertical.live.head import SWITCH
from trainer.vertical.live.source import Source
from trainer.vertical.live.turn import Turn, skipped
from trainer.vertical.parties import Sensor
from trainer.vertical.privacy import account
from trainer.vertical.simulate import send
from trainer.vertical.window import span

_INBOX = 2048  # events, of up to 1 MiB
_TICK = 0.2  # seconds
_LOOK = 0.02  # seconds between two looks for new rows
_CALM = 0.2  # seconds between two LineHello
_SOURCE = "source"  # name in a checkpoint
_FAREWELL = 10.0  # seconds for the head to learn that we have written down the last round


class Deploy(Protocol):
    """What lets a sensor be served: it is told of each that is on the disk."""

    def __call__(self, spec: LineSpec, round_: int, sensor: Sensor, scaling: Scaling, *, last: bool) -> None:
        """There will be no other model after the `last` one."""


class NewRunError(EdgeNodeError):
    """The head has begun another run before this sensor had learnt anything in the one that it was in."""

    def __init__(self, run: str):
        super().__init__("the head has started a new run of this line", "run edge-node line join again")
        self.run = run


def take_part(
    spec: LineSpec,
    name: str,
    source: Source,
    endpoint: Endpoint,
    folder: Path,
    *,
    report: progress.Report,
    stop: Callable[[], bool] = lambda: False,
    deploying: Callable[[], Deploy] = lambda: lambda *_, **__: None,
) -> tuple[int, bool]:
    """Take part in a line to its end; return the last round that was learnt from, and whether the line has ended.

    Raises:
        NewRunError: it is to take part in that one.
        EdgeNodeError: with what to do about it.
    """
    torch.set_num_threads(spec.threads)
    sys.setswitchinterval(SWITCH)
    gc.freeze()  # else every collection goes through all of torch, in the middle of a round
    with disk.claimed(folder):
        sensor = _Sensor(spec, name, source, endpoint, folder, report, deploying())
        try:
            return sensor.run(stop)
        finally:
            sensor.close()


class _Sensor:
    def __init__(
        self,
        spec: LineSpec,
        name: str,
        source: Source,
        endpoint: Endpoint,
        folder: Path,
        report: progress.Report,
        deploy: Deploy,
    ):
        self._spec, self._name, self._report, self._deploy = spec, name, report, deploy
        self._path = source.path
        self._me, self._secret = standing.appear(folder), _secret(folder)
        self._source = source
        self._samples = Samples(source.path, source.columns, spec.cycles, source.unit, source.product, self._say)
        self._checkpoints = Checkpoints(folder / spec.run)
        self._positions = Positions()
        self._attempt = -1
        self._goal: tuple[Opened, float] | None = None  # the newest round that opened, and when we learnt of it
        self._open: Turn | None = None
        self._lacking = Lacking(spec.patience / 2)
        self._told_lacking: Set[str] = frozenset()  # products
        self._lacks = ""  # what the open round waits for, in words
        self._iteration = 0.0  # seconds, as measured in the last round
        self._end: int | None = None  # the last round, once the head has said that it is over
        self._welcome = False
        self._alone = False  # the head was said to be away
        self._ignored: set[str] = set()  # topics
        self._call = False  # whether the head is to be told how far we are
        self._called, self._told = -_CALM, time.monotonic()
        self.round = 0
        self._restore(max(self._checkpoints.rounds))
        self._told_round = self.round

        self._inbox: queue.Queue[object] = queue.Queue(_INBOX)
        federation = spec.federation
        self._presence_topic = topics.presence(federation, name)
        self._link = Link(
            endpoint,
            f"edge-node/{federation}/{name}",
            inbox=self._inbox,
            persistent=False,
            will=(self._presence_topic, self._presence(online=False)),
        )
        self._link.longest = LARGEST_FRAME

    def run(self, stop: Callable[[], bool]) -> tuple[int, bool]:
        federation, name = self._spec.federation, self._name
        self._link.subscribe(
            topics.down(federation, name),
            topics.round_state(federation),
            topics.spec(federation),
            topics.presence(federation, topics.COORDINATOR),
        )
        frames = (topics.opened(federation), topics.representation(federation), topics.gradients(federation, name))
        self._link.subscribe(*frames, qos=0)
        self._samples.refresh()
        if not self._samples.count:
            self._say(f"waiting for rows in {self._path}")
        self._link.open()
        self._say(f"taking part in line {federation!r} as {name}, from round {self.round + 1} on")
        self._tell_protection()
        while self._end is None or self.round < self._end:
            if stop():
                return self.round, False
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=self._nap()))
            if self._inbox.empty():
                self._pursue()
        self._commit()
        self._hand_over(last=True)
        self._link.publish(topics.up(federation, name), encode(Finished(session=self._me.session, run=self._spec.run)))
        self._link.flush(_FAREWELL)
        self._say(f"finished: {some(self.round, 'round')}")
        return self.round, True

    def close(self) -> None:
        self._tell_protection()
        if self._link.connected:
            self._link.publish(self._presence_topic, self._presence(online=False), retain=True)
            self._link.flush(5)
        self._link.close()

    def _nap(self) -> float:
        return _LOOK if self._call or (self._goal and self._open is None) else _TICK

    # What arrives

    def _handle(self, event: object) -> None:
        match event:
            case Delivery(topic=topic, payload=payload):
                try:
                    self._receive(topic, payload)
                except (DecodeError, ValueError) as error:
                    if topic not in self._ignored:
                        self._ignored.add(topic)
                        self._say(f"ignored a message on {topic}, and will others like it: {error}")
            case LinkUp():
                self._link.publish(self._presence_topic, self._presence(online=True), retain=True)
                self._call = True
            case LinkDown(_, reason) if reason == TAKEN_OVER:
                raise EdgeNodeError(
                    f"another process has connected as {self._name}", "stop one of them, or choose another --sensor"
                )
            case LinkDown(_, reason):
                self._say(f"connection lost ({reason}); trying again")

    def _receive(self, topic: str, payload: bytes) -> None:
        if not payload:
            return
        federation = self._spec.federation
        if topic in (topics.opened(federation), topics.representation(federation)) or topic.endswith("/gradients"):
            frame = decode_frame(payload)
            if not isinstance(frame, Opened | Represented | Graded):
                raise ValueError(f"a {type(frame).__name__}")
            if frame.run == self._spec.run:
                self._take(frame)
            return
        match decode(payload, Message):
            case Refusal(session=session) as refusal if session == self._me.session:
                raise EdgeNodeError(f"the head refused {self._name}: {refusal.reason}", refusal.remedy)
            case Welcome(session=session) if session == self._me.session:
                self._welcome = True
                if self._alone:
                    self._alone = False
                    self._say(f"the head is back; the next round is {self.round + 1}")
            case LineSpec(run=run) if run != self._spec.run and not self.round:
                raise NewRunError(run)
            case LineSpec(run=run) if run != self._spec.run:
                raise EdgeNodeError("the head has started a new run of this line", "run edge-node line join again")
            case Presence(online=True):
                self._call = True
            case Presence():
                self._alone = True
                self._say("the head is not connected; waiting for it")
            case RoundState(status="finished", run=run, round=round_) if run == self._spec.run:
                self._finish(round_)

    def _finish(self, round_: int) -> None:
        """The line is over, or was: what is retained may be older than the head that asks for more rounds."""
        if not self._welcome:
            return  # it is said again after the Welcome
        if self.round < round_ and self._spec.absent == "wait":
            self._call = True  # what it takes to get there has been lost
            return
        self._end = self.round

    def _take(self, frame: AnyFrame) -> None:
        match frame:
            case Opened():
                if is_newer(frame, self._attempt, self.round):
                    self._positions.put(frame.since, frame.products)
                    if frame.part == frame.parts - 1:
                        self._aim(frame)
            case Represented() | Graded() if frame.attempt == self._attempt:
                if self._goal and self._goal[0].round == frame.round:
                    if self._spec.absent != "wait" and skipped(frame, self._sensor.index):
                        self._goal = None
                        self._advance(frame.round)
                        return
                    self._embed(*self._goal)  # the round is over at the head, and brought after us
                if self._open and self._open.round == frame.round and self._open.put(frame):
                    self._learn(self._open)

    def _aim(self, frame: Opened) -> None:
        """Work towards a round that has opened, if the model is where that begins."""
        if frame.attempt > self._attempt and not self._go_back(frame.round - 1):
            self._call = True
            return
        self._attempt = frame.attempt
        if frame.round > self.round + 1:
            if self._spec.absent == "wait":
                self._call = True  # what the head has sent in between was lost
                return
            self.round, self._open = frame.round - 1, None
        if self._open and self._open.round == frame.round:
            self._send(self._open)  # we are asked again: something was lost
        else:
            again = self._goal is not None and self._goal[0].round == frame.round  # it waits since then
            self._goal = frame, self._goal[1] if self._goal and again else time.monotonic()

    def _go_back(self, round_: int) -> bool:
        """Be at the end of a round, as a new attempt needs it. False if that cannot be now."""
        self._open = self._goal = None
        if round_ == self.round:
            self._checkpoints.drop(round_ + 1)
            return True
        kept = [each for each in self._checkpoints.rounds if each <= round_]
        if round_ in kept or (kept and self._spec.absent != "wait"):
            self._restore(max(kept))
            self._checkpoints.drop(round_ + 1)
            return True
        return self._spec.absent != "wait"

    # Towards the end of the round

    def _pursue(self) -> None:
        """Do what is to be done next; called when nothing more has arrived."""
        if self._call and time.monotonic() - self._called > _CALM:
            self._hello()
        if self._goal and self._open is None:
            self._embed(*self._goal)

    def _hello(self) -> None:
        self._call, self._called = False, time.monotonic()
        hello = LineHello(
            session=self._me.session,
            run=self._spec.run,
            software=importlib.metadata.version("edge-node"),
            identity=self._me.identity,
            incarnation=self._me.incarnation,
            columns=self._samples.columns,
            round=self.round,
            kept=self._checkpoints.rounds,
            lacks=self._lacks,
        )
        self._link.publish(topics.up(self._spec.federation, self._name), encode(hello))

    def _embed(self, goal: Opened, since: float) -> None:
        """Send the embeddings of a round, once its samples are there, or cannot be waited for any longer."""
        spec = self._spec
        products = self._positions.take(goal.first, goal.last)
        if products is None:
            self._goal, self._call = None, True
            return
        values, missing = self._samples.take(products)
        if missing and self._samples.refresh():
            values, missing = self._samples.take(products)
        if self._waits(products, {products[row] for row in missing}, since):
            return
        if self._samples.scaling is None:
            self._samples.settle(products)
            values, missing = self._samples.take(products)
        begun = time.monotonic()
        samples = torch.from_numpy(values.copy())
        sent = send(spec, self._sensor, samples, goal.round)
        frames = packing.embeddings(
            sent.received,
            sent.second,
            missing,
            run=spec.run,
            attempt=self._attempt,
            round=goal.round,
            session=self._me.session,
            collection=begun - since,
            embedding=time.monotonic() - begun,
            iteration=self._iteration,
        )
        payloads = [encode_frame(each) for each in frames]
        count, size = sent.received.shape
        shared = spec.labels == "shared"
        reply = packing.Phi(count, len(spec.sensors), len(spec.classes)) if shared else packing.Gradient(count, size)
        self._lacks = ""
        self._goal, self._open = None, Turn(goal.round, samples, missing, payloads, reply)
        self._send(self._open)

    def _waits(self, products: Sequence[str], lacking: Set[str], since: float) -> bool:
        """Whether a round is to wait for rows that are lacking; when that takes long it is said which."""
        now = time.monotonic()
        if self._spec.absent != "wait":
            return self._lacking.waits(products, lacking, now - since, now)
        if lacking - self._told_lacking and now - since > self._spec.patience:
            self._told_lacking = lacking
            self._lacks, self._call = self._described([each for each in products if each in lacking]), True
            self._say(f"{self._name} lacks {self._lacks}; the line waits for it")
        return bool(lacking)

    def _described(self, lacking: Sequence[str]) -> str:
        """Products without a sample, and what would help."""
        others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        named, cycles = f"product {brief(lacking[0], 64)}{others}", self._spec.cycles
        if all(map(self._samples.knows, lacking)):
            return f"rows before {named}: a sample takes {cycles} of a unit; leave such out of the labels"
        return f"{named}: append its row"

    def _send(self, turn: Turn) -> None:
        for payload in turn.sent:
            self._link.publish(topics.embeddings(self._spec.federation, self._name), payload, qos=0)

    def _learn(self, turn: Turn) -> None:
        """Take the local iterations of a round."""
        begun = time.monotonic()
        if steps := turn.learn(self._sensor):
            self._iteration = (time.monotonic() - begun) / steps
        self._open = None
        self._advance(turn.round)

    def _advance(self, round_: int) -> None:
        """A round is over; where it led is written down at the end of a group."""
        self.round = round_
        if self.round % self._spec.commit == 0:
            self._commit()
            self._hand_over(last=False)
        self._progress()

    # What is on the disk

    def _commit(self) -> None:
        """Write down where this sensor is; what no checkpoint needs is forgotten."""
        if self.round not in self._checkpoints.rounds:
            state = {f"model.{name}": value for name, value in self._sensor.model.state_dict().items()}
            state[_SOURCE] = torch.frombuffer(bytearray(_read_as(self._source)), dtype=torch.uint8)
            if (scaling := self._samples.scaling) and (extent := self._sensor.extent):
                state |= {f"scaling.{name}": torch.from_numpy(each) for name, each in scaling._asdict().items()}
                state |= {f"extent.{name}": torch.as_tensor(each) for name, each in extent._asdict().items()}
            self._checkpoints.save(self.round, state)
        first = span(self._spec.window, min(self._checkpoints.rounds) + 1)[0]
        self._positions.forget(first)
        if products := self._positions.take(first, first + 1):
            self._samples.forget(products[0])

    def _hand_over(self, *, last: bool) -> None:
        """Let the model that is on the disk be served."""
        if scaling := self._samples.scaling:
            self._deploy(self._spec, self.round, self._sensor, scaling, last=last)

    def _restore(self, round_: int) -> None:
        """Be where a checkpoint was made; round 0 is before the first."""
        spec = self._spec
        shape = (self._samples.columns, spec.cycles)
        index = spec.sensors.index(self._name)
        self._sensor = Sensor(
            index, self._name, spec.network, shape, spec.recipe, spec.seed, spec.privacy.clip, self._secret
        )
        self._samples.scaling = None
        self.round = round_
        if round_:
            state = self._checkpoints.load(round_)
            self._check_source(state[_SOURCE].numpy().tobytes())
            self._sensor.model.load_state_dict(under("model.", state))
            if scaling := under("scaling.", state):  # else it had no rows yet
                self._samples.scaling = Scaling(**{name: each.numpy() for name, each in scaling.items()})
                low, high, deviation = (state[f"extent.{name}"] for name in Extent._fields)
                self._sensor.extent = Extent(low.numpy(), high.numpy(), deviation.item())

    def _check_source(self, before: bytes) -> None:
        """A model knows its columns by their order."""
        if before != (now := _read_as(self._source)):
            raise UsageError(
                f"{self._name} has learnt from other columns: {before.decode()}; they are now {now.decode()}",
                "pass the same --columns, --product and --unit as before, or choose another --state folder",
            )

    # What is told about it

    def _progress(self) -> None:
        """Once a second: rounds may be many."""
        now = time.monotonic()
        if now - self._told >= 1.0:
            rate = (self.round - self._told_round) / max(now - self._told, 1e-3)
            self._report(progress.Learning(node=self._name, round=self.round, rate=max(0.0, rate)))
            self._told, self._told_round = now, self.round

    def _tell_protection(self) -> None:
        if text := account(self._spec, self.round):
            self._say(text)

    def _presence(self, *, online: bool) -> bytes:
        return encode(Presence(session=self._me.session, online=online, identity=self._me.identity))

    def _say(self, text: str) -> None:
        self._report(progress.Note(text=text))


def _read_as(source: Source) -> bytes:
    """What a sensor's samples are made of."""
    return msgspec.json.encode({"columns": source.columns, "product": source.product, "unit": source.unit})


def _secret(folder: Path) -> bytes:
    """What protection draws its noise by: 32 bytes, made for the state folder, that nobody else knows."""
    path = folder / "secret"
    if not path.exists():
        with disk.writing(folder):
            disk.replace_bytes(path, secrets.token_bytes(32), mode=0o600)
    return path.read_bytes()
