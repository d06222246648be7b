"""The head's process: MQTT, clock, model and files around the state machine of the head."""

import contextlib
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import NamedTuple

from broker_config.mqtt.client import Connected, Delivery, Disconnected, TakenOver
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.event_queue import EventQueue
from broker_config.protocol import topics
from broker_config.protocol.codec import decode
from broker_config.protocol.errors import PeerError, abbreviate
from broker_config.protocol.messages import Finished, Message, Presence, RoundState, Stage
from edge.terminal.formatting import format_validation, pluralize
from edge_node.extensions.vfl import topics as vfl_topics
from edge_node.extensions.vfl.denoiser import sends_pairs
from edge_node.extensions.vfl.frames import Embeddings, decode_frame, encode_frame
from edge_node.extensions.vfl.messages import VflHello, VflSpec
from edge_node.extensions.vfl.privacy import describe_spent
from edge_node.extensions.vfl.process_setup import EVENT_QUEUE
from edge_node.extensions.vfl.server import head_state as states
from edge_node.extensions.vfl.server.connection import HeadConnection, Replies
from edge_node.extensions.vfl.server.head_model import Deploy, HeadModel, RoundInputs, timing
from edge_node.extensions.vfl.server.journal import Journal
from edge_node.extensions.vfl.server.labels import Labels
from edge_node.extensions.vfl.server.response_times import ResponseTimes
from edge_node.extensions.vfl.server.round_allowance import RoundAllowance
from edge_node.extensions.vfl.server.round_state import OpenRound
from edge_node.extensions.vfl.server.status import StatusTracker
from trainer import progress
from trainer.federation.presence import await_broker
from trainer.federation.server.membership import HELLO_COST, Membership

_TICK = 0.2  # seconds
_POLL = 0.02  # seconds between two readings of the labels' file while products are awaited
_LARGEST_ROUND = 1_000_000  # in a RoundState
_FAR = 1.0  # sum of a round's steps (research/results/dao_vfl/README.md, the pace of a run)


class _Round(NamedTuple):
    """The open round."""

    parts: OpenRound
    span: tuple[int, int]  # positions of its products


class _ClosedRound(NamedTuple):
    """The round before it."""

    parts: OpenRound
    span: tuple[int, int]
    replies: Replies
    inputs: RoundInputs
    seconds: float  # since the round before it was closed


class Head:
    """One process of the head of a vertical federation."""

    def __init__(
        self,
        spec: VflSpec,
        labels: Labels,
        endpoint: Endpoint,
        folder: Path,
        journal: Journal,
        rounds: int,
        report: progress.Report,
        deploy: Deploy,
        timing: states.Timing,
    ):
        self._spec = spec
        self._labels = labels
        self._folder = folder
        self._journal = journal
        self._report = report
        self._deploy = deploy
        now = time.monotonic()
        members = journal.members(spec.run)
        plan = states.Plan(spec.sensors, rounds, spec.absent == "wait", spec.patience, timing)
        self._state = states.HeadState(plan, since=now, finished=now, members=members)
        self._events: deque[states.Event] = deque()  # the first one is being acted on
        self._model: HeadModel | None = None
        self._attempt = 0
        self._open: _Round | None = None
        self._closed: _ClosedRound | None = None
        self._grown = now  # when the file of labels last had news

        self._identities = {name: each.identity for name, each in members.items()}
        self._membership = Membership(len(spec.sensors), self._identities)
        self._inbox = EventQueue(EVENT_QUEUE)
        self._connection = HeadConnection(
            endpoint, spec, secrets.token_hex(8), self._inbox, self, self._membership, report
        )
        self._tracker = StatusTracker(spec)
        self._times = ResponseTimes(spec.sensors, spec.patience, now)
        self._received = RoundAllowance(2 * states.REPEATS)  # embeddings from each sensor

    def run(self, stop: Callable[[], bool]) -> int:
        """Run to the last round, or until `stop` says so; return the last round that is closed.

        Raises: coordinate.
        """
        if not await_broker(self._connection.open, self._report, stop):
            return self.round
        self._handle(self._inbox.get())  # Connected: what is retained of an earlier run is replaced
        self._publish_status(anyway=True)
        self._connection.mqtt.flush(5)
        spec = self._spec
        plan = self._state.plan
        self._report(
            progress.Gathering(
                federation=spec.federation,
                run=spec.run,
                nodes=len(spec.sensors),
                rounds=plan.rounds,
                what="sensor",
            )
        )
        own = (
            self._load_model().progress
            if self._journal.has_rounds(spec.run)
            else self._state.progress
        )
        self._report_plan()
        self._advance(states.Started(own, time.monotonic()))
        while not (stop() or self._state.ended):
            with contextlib.suppress(queue.Empty):
                timeout = _POLL if self._state.awaits_products else _TICK
                self._handle(self._inbox.get(timeout=timeout))
            self._connection.drop_silent_members()
            self._advance(states.Tick(time.monotonic()))
            self._deploy_model(last=False)
            self._publish_status()
        self._deploy_model(last=True)
        return self.round

    def close(self) -> None:
        """Report the result, and disconnect."""
        if self._model:
            self._report_privacy(self._model)
        self._publish_status(anyway=True)
        if self.is_over:
            loss = "" if self._tracker.loss is None else f", loss {self._tracker.loss:.3f}"
            score = self._model.validation.score() if self._model else None
            judged = f"; {format_validation(score)}" if score else ""
            self._note(f"finished: {pluralize(self.round, 'round')}{loss}{judged}")
        try:
            if not self.round and not self._journal.has_rounds(self._spec.run):
                self._connection.withdraw()
        finally:  # the journal may be what has failed: the broker would take this head for present
            self._connection.close()

    @property
    def round(self) -> int:
        """The last one that the model has learnt from."""
        return self._model.round if self._model else 0

    @property
    def is_over(self) -> bool:
        """Whether the last round is closed."""
        return self._state.is_over

    @property
    def present(self) -> frozenset[str]:
        """Sensors that are connected, as far as is known."""
        return self._state.present

    def _deploy_model(self, *, last: bool) -> None:
        if self._model:
            self._model.deploy(last=last)

    # Effects

    def _advance(self, event: states.Event) -> None:
        """Act on an event, and on those that its effects bring about."""
        self._events.append(event)
        if len(self._events) > 1:
            return  # an effect has brought it about: it has its turn
        while self._events:
            self._state, effects = states.advance(self._state, self._events[0])
            for effect in effects:
                self._perform(effect)
            self._events.popleft()

    def _perform(self, effect: states.Effect) -> None:
        match effect:
            case states.Close():
                self._close_round()
            case states.Open(round_):
                self._open_round(round_)
            case states.Train():
                self._train()
            case states.Gather():
                self._open = self._closed = None
                self._connection.call_roll()
            case states.Load():
                self._advance(states.Loaded(self._load_model().progress, time.monotonic()))
            case states.Restore(round_):
                self._loaded.restore(round_)
            case states.Begin():
                self._attempt = self._journal.attempt(self._spec.run)
                self._times.start_attempt()
            case states.Finish():
                self._finish()
            case states.Report(event, key):
                if not key or self._membership.is_first_report(*key):
                    self._report(event)
            case _:
                self._serve(effect)

    def _serve(self, effect: states.SensorEffect) -> None:
        match effect:
            case states.RepeatOpening(sensor):
                self._repeat_opening(self._open, sensor)
            case states.RepeatRound(sensor):
                self._repeat_opening(self._closed, sensor)
                replies = self._closed.replies if self._closed else ()
                self._connection.resend_replies(replies, sensor)
            case states.Admit(sensor, member):
                self._journal.admit(self._spec.run, sensor, member)
                self._identities[sensor] = member.identity
            case states.Welcome(sensor, hello):
                self._connection.welcome(sensor, hello)
            case states.Reject(sensor, refusal):
                self._connection.reject(sensor, refusal)
            case states.Refuse(sensor, reason, remedy):
                self._connection.refuse(PeerError(sensor, reason, self.round, remedy))
            case states.SendEnd(sensor):
                if session := self._membership.session(sensor):
                    self._connection.send(sensor, Finished(session=session, run=self._spec.run))

    @property
    def _loaded(self) -> HeadModel:
        assert self._model
        return self._model

    def _load_model(self) -> HeadModel:
        """The model for the sensors that there are, as it is on the disk."""
        columns = {name: each.columns for name, each in self._state.members.items()}
        self._model = HeadModel(
            self._spec, columns, self._labels, self._folder, self._journal, self._note, self._deploy
        )
        self._report_privacy(self._model)
        return self._model

    def _open_round(self, round_: int) -> None:
        """Announce a round, unless its products are not there yet."""
        spec = self._spec
        model = self._loaded
        first, last = span = spec.window.span(round_)
        if self._labels.count < last:
            now = time.monotonic()
            if self._labels.refresh():
                self._grown = now
            if self._labels.count < last:
                self._advance(states.Lacking(str(self._labels.path), self._grown, now))
                return
        since = self._closed.span[1] if self._closed else first
        pairs = sends_pairs(spec.denoising, round_)
        gaps = spec.absent != "wait"
        parts = OpenRound(
            spec.run, self._attempt, round_, last - first, model.sizes, pairs=pairs, gaps=gaps
        )
        self._open = _Round(parts, span)
        now = time.monotonic()
        self._times.open_round(round_, now)
        self._labels.drop_before(spec.window.span(min(model.progress.kept) + 1)[0])
        self._connection.send_opening(parts, span, since, self._labels.products(since, last))
        self._advance(states.Opened(round_, now))

    def _repeat_opening(self, round_: _Round | _ClosedRound | None, sensor: str) -> None:
        assert round_
        parts, span, *_ = round_
        self._connection.send_opening(parts, span, span[0], self._labels.products(*span), sensor)

    def _close_round(self) -> None:
        """Send what the open round trains with."""
        assert self._open
        (parts, span) = self._open
        model = self._loaded
        inputs = model.represent(parts, *span, timing(self._spec.sensors, self._times.costs))
        frame = {"run": self._spec.run, "attempt": parts.attempt, "round": parts.round}
        replies = [(name, encode_frame(each)) for name, each in model.replies(inputs, **frame)]
        self._connection.send_replies(replies)
        now = time.monotonic()
        self._received.renew(now)
        seconds = self._times.close_round(inputs.iterations, now)
        self._open = None
        self._closed = _ClosedRound(parts, span, replies, inputs, seconds)

    def _train(self) -> None:
        assert self._closed
        parts, span, _, inputs, seconds = self._closed
        model = self._loaded
        closed = model.train(inputs, parts, span, seconds, self._times.costs)
        self._tracker.record_round(closed)
        loss = inf if closed.loss is None else closed.loss
        ended = closed.round == self._state.plan.rounds
        if trouble := model.validation.find_trouble(loss, closed.validation, ended=ended):
            self._note(trouble)
        self._advance(states.Trained(model.progress, time.monotonic()))

    def _finish(self) -> None:
        """Write down and deploy the last round, and publish the end."""
        self._loaded.commit()
        self._deploy_model(last=True)
        self.publish_state()
        self._advance(states.Saved(self._loaded.progress.kept))

    # Messages

    def _handle(self, event: object) -> None:
        if isinstance(event, Delivery | Connected | Disconnected | TakenOver):
            self._connection.handle(event)

    def process(self, sensor: str, delivery: Delivery) -> None:
        """Act on a sensor's message. PeerError or DecodeError if it breaks the protocol."""
        federation = self._spec.federation
        if sensor not in self._spec.sensors:
            raise PeerError(
                abbreviate(sensor, 64),
                f"the sensors of this federation are {', '.join(self._spec.sensors)}",
            )
        if delivery.topic == vfl_topics.embeddings(federation, sensor):
            if self._open and self._takes(sensor, len(delivery.payload), self._open.parts):
                self._receive_embeddings(sensor, decode_frame(delivery.payload), self._open.parts)
            return
        cost = HELLO_COST if delivery.topic == topics.up(federation, sensor) else 1
        if not self._connection.is_flooding(sensor, cost):
            self._dispatch(sensor, decode(delivery.payload, Message))

    def _takes(self, sensor: str, size: int, parts: OpenRound) -> bool:
        """Whether embeddings of so many bytes are looked at: those of an open round,
        as far as they can be meant.
        """
        taken = self._received.spend(sensor, size / parts.part_bytes(sensor), time.monotonic())
        if not taken and self._membership.is_first_report("embeddings", sensor):
            self._note(
                f"{sensor} sends many times what its embeddings take: what is too much is ignored"
            )
        return taken

    def _receive_embeddings(self, sensor: str, frame: object, parts: OpenRound) -> None:
        if not isinstance(frame, Embeddings):
            raise PeerError(sensor, f"it sent a {type(frame).__name__} as embeddings")
        if frame.session != self._membership.session(sensor):  # it is of an earlier process
            return
        self._membership.confirm(sensor)
        before = parts.received_rows(sensor)
        now = time.monotonic()
        whole = parts.add_frame(sensor, frame)
        if frame.attempt != parts.attempt:
            return
        news = whole or parts.received_rows(sensor) > before
        ended = whole or (frame.round < parts.round and frame.part == frame.parts - 1)
        if whole:
            self._tracker.latency[sensor] = self._times.measure(
                sensor, parts.arrived[sensor].costs, now
            )
        prompt = ended and self._times.is_recent(frame.round, now)
        self._advance(states.Embedded(sensor, news, whole, prompt, now))

    def _dispatch(self, sensor: str, message: Message) -> None:
        match message:
            case Presence(online=False):
                if message.session == self._membership.session(sensor):
                    self.mark_lost(sensor)
            case Presence():
                pass
            case VflHello():
                if self._connection.may_join(sensor, message):
                    new = self._membership.session(sensor) != message.session
                    self._advance(states.Joined(sensor, message, new, time.monotonic()))
            case Finished(run=run):
                if run == self._spec.run:
                    self._advance(states.Finished(sensor))
            case _:
                raise PeerError(sensor, f"it sent a {type(message).__name__}")

    def mark_lost(self, sensor: str) -> None:
        """A sensor's connection has ended."""
        self._advance(states.Lost(sensor))
        self._membership.confirm(sensor)

    def exclude(self, sensor: str) -> None:
        """A sensor was refused."""
        self._advance(states.Excluded(sensor))

    # Reports

    def publish_state(self) -> None:
        """Publish that rounds have begun, or are over."""
        status: Stage = "finished" if self.is_over else "open"
        self._connection.publish_round(
            RoundState(run=self._spec.run, round=min(self.round, _LARGEST_ROUND), status=status)
        )

    def _publish_status(self, *, anyway: bool = False) -> None:
        state = self._state
        awaited = state.describe_wait() if state.paused else ""
        overview = self._tracker.next_overview(
            self.round,
            state.stage,
            state.present - state.absent,
            paused=state.paused,
            awaited=awaited,
            anyway=anyway,
            lacks=state.lacks,
        )
        if overview is None:
            return
        self._connection.publish_status(overview)
        if overview.loss is not None:
            self._report(
                progress.Learning(
                    node=topics.COORDINATOR,
                    round=self.round,
                    rounds=state.plan.rounds,
                    loss=overview.loss,
                    validation=overview.validation,
                    rate=overview.rate,
                )
            )

    def _report_plan(self) -> None:
        """What rounds learn from, and whether there is enough of it yet."""
        window = self._spec.window
        recipe = self._spec.recipe
        rounds = self._state.plan.rounds
        newest = f"the newest {window.size}" if window.size else "all"
        self._note(
            f"{window.start} products in the first round, {window.chunk} more in each later one, "
            f"of which {newest} count; learning rate {recipe.eta:.3g}"
        )
        if (moved := recipe.eta * recipe.batches * self._spec.iterations) > _FAR:
            self._note(
                f"steps of a round add up to {moved:.3g}: beyond {_FAR:g} parties that learn at "
                "once mostly overshoot; a smaller --eta is safer"
            )
        there = self._labels.count
        needed = window.span(rounds)[1] if rounds else 0
        if not there:
            self._note(f"waiting for rows in {self._labels.path}")
        elif there < needed:
            played = max(0, (there - window.start) // window.chunk + 1)
            self._note(
                f"{self._labels.path} has {pluralize(there, 'product')}, enough for "
                f"{pluralize(played, 'round')}; {rounds} take {needed}"
            )

    def _report_privacy(self, model: HeadModel) -> None:
        if text := describe_spent(self._spec, model.round):
            self._note(text)

    def _note(self, text: str) -> None:
        self._report(progress.Note(text=text))
