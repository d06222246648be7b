"""The head's process: MQTT and clock around the state of the open round and the head's model."""

import contextlib
import queue
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from broker_config.mqtt.client import Connected, Delivery, Disconnected, TakenOver
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.event_queue import EventQueue
from broker_config.protocol import topics
from broker_config.protocol.codec import decode
from broker_config.protocol.errors import PeerError, abbreviate
from broker_config.protocol.frames import Embeddings, decode_frame, encode_frame
from broker_config.protocol.messages import Finished, Message, Presence, Refusal, RoundState, Stage
from broker_config.protocol.vfl_messages import VflHello, VflSpec
from edge.terminal.formatting import pluralize
from trainer import progress
from trainer.federation.presence import await_room
from trainer.federation.server.membership import HELLO_COST, WINDOW, Membership
from trainer.vfl.denoiser import sends_pairs
from trainer.vfl.privacy import describe_spent
from trainer.vfl.process_setup import EVENT_QUEUE
from trainer.vfl.server.connection import HeadConnection, Replies
from trainer.vfl.server.head_model import Deploy, HeadModel, timing
from trainer.vfl.server.journal import Journal, Member
from trainer.vfl.server.labels import Labels
from trainer.vfl.server.response_times import ResponseTimes
from trainer.vfl.server.round_allowance import RoundAllowance
from trainer.vfl.server.round_state import OpenRound, PartyProgress, find_common_round
from trainer.vfl.server.status import StatusTracker

_TICK = 0.2  # seconds
_POLL = 0.02  # seconds between two readings of the labels' file while products are awaited
_QUIET = 10.0  # seconds without products after which it is reported that the round waits for them
_LINGER = 30.0  # seconds for sensors to write down the last round
_LARGEST_ROUND = 1_000_000  # in a RoundState
_REPEATS = 8  # times that a sensor is sent what it lacks of a round; each time it may answer, and as often unasked


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
    ):
        self._spec, self._labels, self._folder, self._journal = spec, labels, folder, journal
        self._rounds, self._report, self._deploy = rounds, report, deploy
        self.present: set[str] = set()  # sensors that are connected, as far as is known
        self._members = journal.members(spec.run)
        self._identities = {name: each.identity for name, each in self._members.items()}
        self._membership = Membership(len(spec.sensors), self._identities)
        self._inbox = EventQueue(EVENT_QUEUE)
        self._connection = HeadConnection(
            endpoint, spec, secrets.token_hex(8), self._inbox, self, self._membership, report
        )
        self._tracker = StatusTracker(spec)

        self._model: HeadModel | None = None
        self._progress: dict[str, PartyProgress] = {}  # of the sensors that have answered since gathering began
        self._gathering, self._attempt = True, 0
        self._open: OpenRound | None = None
        self._span = (0, 0)  # positions of its products
        self._previous: tuple[OpenRound, tuple[int, int], Replies] | None = None
        self._done: set[str] = set()  # sensors that have written down the last round
        self._gathered = self._finished = time.monotonic()
        self._times = ResponseTimes(spec.sensors, spec.patience, self._gathered)
        self._sent, self._received = RoundAllowance(_REPEATS), RoundAllowance(2 * _REPEATS)  # to and from each sensor
        self._paused = False
        self._awaited = ""  # what was last reported to be waited for
        self._loss: float | None = None  # of the last round

    def run(self, stop: Callable[[], bool]) -> int:
        """Run to the last round, or until `stop` says so; return the last round that is closed. Raises: coordinate."""
        if not await_room(self._connection.open, self._report, stop):
            return self.round
        self._handle(self._inbox.get())  # Connected: what is retained of an earlier run is replaced
        spec = self._spec
        self._report(
            progress.Gathering(
                federation=spec.federation, run=spec.run, nodes=len(spec.sensors), rounds=self._rounds, what="sensor"
            )
        )
        if self._journal.has_rounds(spec.run):
            self._model = self._load_model()
        if not self._labels.count:
            self._note(f"waiting for rows in {self._labels.path}")
        self._gather()
        while not (stop() or self._is_done()):
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=self._poll_interval()))
            self._check_timers()
        return self.round

    def close(self) -> None:
        """Report the result, and disconnect."""
        if self._model:
            self._report_privacy(self._model.round)
        self._publish_status(anyway=True)
        if self.is_over:
            loss = "" if self._loss is None else f", loss {self._loss:.3f}"
            self._note(f"finished: {pluralize(self.round, 'round')}{loss}")
        try:
            if not self.round and not self._journal.has_rounds(self._spec.run):
                self._connection.withdraw()
        finally:  # the journal may be what has failed: the broker would take this head for present
            self._connection.close()

    @property
    def round(self) -> int:
        """The last one that is closed."""
        return self._model.round if self._model else 0

    def _poll_interval(self) -> float:
        waits = self._open is None and not self._gathering and not self.is_over
        return _POLL if waits else _TICK

    # The round to go on from

    def _gather(self) -> None:
        """Ask every sensor how far it is; when all have answered, rounds go on from where all can."""
        self._gathering, self._open, self._previous, self._progress = True, None, None, {}
        self._done.clear()
        self._gathered = time.monotonic()
        self._connection.call_roll()

    def _try_to_resume(self) -> None:
        """Go on if it is known from which round."""
        spec = self._spec
        expected = [name for name in spec.sensors if name not in self._progress]
        late = time.monotonic() - self._gathered > spec.patience
        sizes_known = self._members.keys() >= set(spec.sensors)  # since each sensor has named its columns
        if expected and (spec.absent == "wait" or not late or not self._progress or not sizes_known):
            return
        if not self.round:  # until the first round is closed, a sensor may still come with other columns
            self._model = self._load_model()
        assert self._model
        model, target = self._model, self._model.round
        if spec.absent == "wait":
            common = find_common_round(model.progress, self._progress)
            if common is None:
                self._refuse_stragglers(model.progress)
                return
            target = common
        if target != model.round:
            self._note(f"going back from round {model.round} to round {target}, which all have on their disks")
            model.restore(target)
        self._gathering, self._attempt = False, self._journal.attempt(spec.run)
        self._times.start_attempt(expected)
        self._next()

    def _load_model(self) -> HeadModel:
        """The model for the sensors that there are, as it is on the disk."""
        columns = {name: each.columns for name, each in self._members.items()}
        model = HeadModel(self._spec, columns, self._labels, self._folder, self._journal, self._note, self._deploy)
        self._report_privacy(model.round)
        return model

    def _refuse_stragglers(self, ours: PartyProgress) -> None:
        for name, theirs in list(self._progress.items()):
            if not set(ours.kept) & set(theirs.kept):
                del self._progress[name]
                older = "head's" if min(theirs.kept, default=0) > ours.round else "sensor's"
                self._connection.refuse(
                    PeerError(
                        name,
                        f"it can go back to rounds {theirs.kept}, the head to {ours.kept}",
                        ours.round,
                        f"put the newer of the {older} --state folder back, or begin anew: edge-node vfl coordinate "
                        "--new",
                    )
                )

    # Rounds

    def _next(self) -> None:
        """Open the next round if its products are there; after the last one, publish the end."""
        assert self._model
        if self.is_over:
            self._finished = time.monotonic()
            self._model.commit()
            self._model.deploy(last=True)
            self.publish_state()
            return
        self._open_round(self._model.round + 1)

    def _open_round(self, round_: int) -> None:
        """Open a round, unless its products are not there yet."""
        assert self._model
        first, last = self._span = self._spec.window.span(round_)
        if self._labels.count < last:
            self._labels.refresh()
            if self._labels.count < last:
                self._paused = True
                if time.monotonic() - max(self._times.closed, self._gathered) > _QUIET:
                    self._note_waiting(f"waiting for more products in {self._labels.path}")
                return
        since = first if self._previous is None else self._previous[1][1]
        pairs = sends_pairs(self._spec.denoising, round_)
        spec, sizes, gaps = self._spec, self._model.sizes, self._spec.absent != "wait"
        self._open = OpenRound(spec.run, self._attempt, round_, last - first, sizes, pairs=pairs, gaps=gaps)
        self._times.open_round(round_, time.monotonic())
        self._labels.drop_before(spec.window.span(min(self._model.progress.kept) + 1)[0])
        self._connection.send_opening(self._open, self._span, since, self._labels.products(since, last))

    def _receive_embeddings(self, sensor: str, frame: Embeddings) -> None:
        round_, now = self._open, time.monotonic()
        if round_ is None:
            return
        before = round_.received_rows(sensor)
        whole = round_.add_frame(sensor, frame)
        if frame.attempt != round_.attempt:
            return
        ended = whole or (frame.round < round_.round and frame.part == frame.parts - 1)
        self._times.record(sensor, frame.round, now, news=whole or round_.received_rows(sensor) > before, ended=ended)
        if not whole:
            return
        self._tracker.lacks.pop(sensor, None)
        self._tracker.latency[sensor] = self._times.measure(sensor, round_.arrived[sensor].costs, now)
        if not round_.find_missing(self._spec.sensors):
            self._close_round(round_)

    def _close_round(self, round_: OpenRound) -> None:
        """Send what the round trains with, open the next one, and train while the sensors do."""
        assert self._model
        model, spec, positions = self._model, self._spec, self._span
        inputs = model.represent(round_, *positions, timing(spec.sensors, self._times.costs))
        frame = {"run": spec.run, "attempt": round_.attempt, "round": round_.round}
        replies = [(name, encode_frame(each)) for name, each in model.replies(inputs, **frame)]
        self._connection.send_replies(replies)
        now = time.monotonic()
        self._sent.renew(now)
        self._received.renew(now)
        seconds = self._times.close_round(inputs.iterations, now)
        self._previous, self._open = (round_, positions, replies), None
        if round_.round != self._rounds:
            self._open_round(round_.round + 1)
        closed = model.train(inputs, round_, positions, seconds, self._times.costs)
        self._paused, self._loss = False, closed.loss
        self._tracker.record_round(closed)
        if self.is_over:
            self._next()

    @property
    def is_over(self) -> bool:
        """Whether the last round is closed."""
        return self._model is not None and 0 < self._rounds <= self._model.round

    def _is_done(self) -> bool:
        """Whether the last round is closed and on the disks of all sensors that can be expected to write it there."""
        if not self.is_over or (self._gathering and self.present):
            return False
        waited = time.monotonic() - self._finished
        return self._done >= set(self._spec.sensors) - self._times.absent or waited > _LINGER

    # Timers

    def _check_timers(self) -> None:
        now = time.monotonic()
        self._connection.drop_silent_members()
        if self._open is not None:
            self._check_round(self._open, now)
        elif self._gathering:
            if self._progress:
                self._try_to_resume()
            if now - self._gathered > self._spec.patience and self._members:
                self._pause_gathering([name for name in self._spec.sensors if name not in self._progress])
        elif not self.is_over:
            self._next()
        self._publish_status()

    def _check_round(self, round_: OpenRound, now: float) -> None:
        missing = round_.find_missing(self._spec.sensors)
        late = self._times.find_late(missing, now)
        if late and self._spec.absent == "wait":
            self._pause(round_.round, late)
        elif late:
            self._times.absent |= set(late)
        if round_.arrived and self._spec.absent != "wait" and not set(missing) - self._times.absent:
            self._close_round(round_)
        elif missing and self._times.is_time_to_ask(now):
            for name in missing:
                self._resend_opening(name)

    def _pause_gathering(self, waiting_for: list[str]) -> None:
        if not self.is_over:
            self._pause(self.round + 1, waiting_for)
        elif self._progress:
            behind = ", ".join(sorted(name for name, each in self._progress.items() if each.round < self.round))
            gone = ", ".join(waiting_for)
            self._note_waiting(
                f"{behind} came back without round {self.round}, and {gone} has ended: start {gone} again, and the "
                "last rounds are played once more"
            )

    def _pause(self, round_: int, waiting_for: list[str]) -> None:
        self._paused = True
        self._note_waiting(f"round {round_} waits for {', '.join(waiting_for)}")

    # Messages

    def _handle(self, event: object) -> None:
        if isinstance(event, Delivery | Connected | Disconnected | TakenOver):
            self._connection.handle(event)

    def process(self, sensor: str, delivery: Delivery) -> None:
        """Act on a sensor's message. PeerError or DecodeError if it breaks the protocol."""
        federation = self._spec.federation
        if sensor not in self._spec.sensors:
            raise PeerError(
                abbreviate(sensor, 64), f"the sensors of this federation are {', '.join(self._spec.sensors)}"
            )
        if delivery.topic == topics.embeddings(federation, sensor):
            if not self._takes(sensor, len(delivery.payload)):
                return
            frame = decode_frame(delivery.payload)
            if not isinstance(frame, Embeddings):
                raise PeerError(sensor, f"it sent a {type(frame).__name__} as embeddings")
            if frame.session == self._membership.session(sensor):  # else it is of an earlier process
                self._membership.confirm(sensor)
                self._receive_embeddings(sensor, frame)
            return
        cost = HELLO_COST if delivery.topic == topics.up(federation, sensor) else 1
        if not self._connection.is_flooding(sensor, cost):
            self._dispatch(sensor, decode(delivery.payload, Message))

    def _takes(self, sensor: str, size: int) -> bool:
        """Whether embeddings of so many bytes are looked at: those of an open round, as far as they can be meant."""
        if self._open is None:
            return False
        taken = self._received.spend(sensor, size / self._open.part_bytes(sensor), time.monotonic())
        if not taken and self._membership.is_first_report("embeddings", sensor):
            self._note(f"{sensor} sends many times what its embeddings take: what is too much is ignored")
        return taken

    def _dispatch(self, sensor: str, message: Message) -> None:
        match message:
            case Presence(online=False):
                if message.session == self._membership.session(sensor):
                    self.mark_lost(sensor)
            case Presence():
                pass
            case VflHello():
                self._admit(sensor, message)
            case Finished(run=run):
                if run == self._spec.run and self.is_over:
                    self._done.add(sensor)
            case _:
                raise PeerError(sensor, f"it sent a {type(message).__name__}")

    def _admit(self, sensor: str, hello: VflHello) -> None:
        if not self._connection.may_join(sensor, hello):
            return
        known, member = self._members.get(sensor), Member(hello.identity, hello.columns)
        if known and known.columns != member.columns and self.round:
            reason = f"{sensor} had {known.columns} columns, and now has {member.columns}"
            remedy = "pass the same --columns as before, or begin anew: edge-node vfl coordinate --new"
            self._connection.reject(sensor, Refusal(session=hello.session, reason=reason, remedy=remedy))
            return
        if known != member:
            self._journal.admit(self._spec.run, sensor, member)
            self._members[sensor], self._identities[sensor] = member, member.identity
        if sensor not in self.present:
            self._report(progress.NodeJoined(node=sensor))
        if self._membership.session(sensor) != hello.session:
            self._times.absent.discard(sensor)
        is_news = hello.lacks and hello.lacks != self._tracker.lacks.get(sensor)
        if is_news and self._membership.is_first_report("lacks", sensor, time.monotonic() // WINDOW):
            self._note(f"the round waits for {sensor}, which lacks {abbreviate(hello.lacks, 300)}")
        self._tracker.lacks[sensor] = hello.lacks
        self.present.add(sensor)
        self._connection.welcome(sensor, hello)
        self._catch_up(sensor, PartyProgress(hello.round, hello.kept))

    def _catch_up(self, sensor: str, theirs: PartyProgress) -> None:
        """Bring a sensor to the open round, or go back with all to where it is."""
        if self._model is None or self._gathering:
            self._progress[sensor] = theirs
            self._try_to_resume()
        elif self._sent.spend(sensor, 1, time.monotonic()):
            self._send_missed_round(sensor, self._model.round - theirs.round)
        elif self._membership.is_first_report("repeats", sensor):
            self._note(f"{sensor} asks for the same round again and again: it has to wait")
        if self.is_over and (theirs.round == self.round or self._spec.absent != "wait"):
            session = self._membership.session(sensor)
            if session:  # sent to it alone: a retained end could be replayed later
                self._connection.send(sensor, Finished(session=session, run=self._spec.run))

    def _send_missed_round(self, sensor: str, behind: int) -> None:
        """Send a sensor that is so many rounds behind what it lacks; or go back with all to where it is."""
        if behind == 1 and self._previous is not None and self._previous[0].round == self.round:
            round_, positions, replies = self._previous
            self._send_whole_opening(round_, positions, sensor)
            self._connection.resend_replies(replies, sensor)
        elif behind and self._spec.absent == "wait":
            self._gather()
            return
        self._resend_opening(sensor)

    def _resend_opening(self, sensor: str) -> None:
        """Announce the open round again, to this sensor alone."""
        if self._open:
            self._send_whole_opening(self._open, self._span, sensor)

    def _send_whole_opening(self, round_: OpenRound, positions: tuple[int, int], sensor: str) -> None:
        self._connection.send_opening(round_, positions, positions[0], self._labels.products(*positions), sensor)

    def mark_lost(self, sensor: str) -> None:
        """A sensor's connection has ended."""
        if sensor in self.present and not self.is_over:
            self._report(progress.NodeLost(node=sensor, round=self.round))
        self.present.discard(sensor)
        self._membership.confirm(sensor)

    def exclude(self, sensor: str) -> None:
        """A sensor was refused."""
        self.present.discard(sensor)

    # Reports

    def publish_state(self) -> None:
        """Publish that rounds have begun, or are over."""
        status: Stage = "finished" if self.is_over else "open"
        self._connection.publish_round(
            RoundState(run=self._spec.run, round=min(self.round, _LARGEST_ROUND), status=status)
        )

    def _publish_status(self, *, anyway: bool = False) -> None:
        present = self.present - self._times.absent
        stage: Stage = "finished" if self.is_over else "gathering" if self._gathering else "open"
        overview = self._tracker.next_overview(self.round, stage, present, paused=self._paused, anyway=anyway)
        if overview is None:
            return
        self._connection.publish_status(overview)
        if overview.loss is not None:
            self._report(
                progress.Learning(
                    node=topics.COORDINATOR,
                    round=self.round,
                    rounds=self._rounds,
                    loss=overview.loss,
                    rate=overview.rate,
                )
            )

    def _note_waiting(self, text: str) -> None:
        """Report what the round waits for, unless that was reported last."""
        if text != self._awaited:
            self._awaited = text
            self._note(text)

    def _report_privacy(self, round_: int) -> None:
        if text := describe_spent(self._spec, round_):
            self._note(text)

    def _note(self, text: str) -> None:
        self._report(progress.Note(text=text))
