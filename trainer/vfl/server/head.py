"""The head of a line: MQTT and clock around what has arrived (`exchange`) and what is made of it (`server`)."""

import contextlib
import queue
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from broker_config.mqtt.client import Connected, Delivery, Disconnected
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.event_queue import EventQueue
from broker_config.protocol import topics
from broker_config.protocol.errors import PeerError
from broker_config.protocol.frames import Embeddings, encode_frame
from broker_config.protocol.messages import Stage
from broker_config.protocol.vfl_messages import VflSpec
from edge.terminal.formatting import pluralize
from trainer import progress
from trainer.vfl.denoiser import sends_pairs
from trainer.vfl.privacy import describe_spent
from trainer.vfl.process_setup import EVENT_QUEUE
from trainer.vfl.server.admission import Reception
from trainer.vfl.server.announcements import Crier, Replies
from trainer.vfl.server.head_model import Deploy, HeadModel, timing
from trainer.vfl.server.journal import Journal
from trainer.vfl.server.labels import Labels
from trainer.vfl.server.response_times import ResponseTimes
from trainer.vfl.server.round_state import OpenRound, PartyProgress, find_common_round
from trainer.vfl.window import span

_TICK = 0.2  # seconds
_LOOK = 0.02  # seconds between two looks for new products
_QUIET = 10.0  # seconds without products after which it is said that the line waits for them
_LINGER = 30.0  # seconds for sensors to write down the last round


class Head:
    """One process of a line's head."""

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
        self._inbox = EventQueue(EVENT_QUEUE)
        session = secrets.token_hex(8)
        self._crier = Crier(endpoint, spec, session, self._inbox)
        self._reception = Reception(spec, endpoint, session, journal, self._crier, self, report)

        self._model: HeadModel | None = None
        self._progress: dict[str, PartyProgress] = {}  # of the sensors that have answered since we last gathered
        self._gathering, self._attempt = True, 0
        self._collecting: OpenRound | None = None  # the open round
        self._span = (0, 0)
        self._before: tuple[OpenRound, tuple[int, int], Replies] | None = None
        self._done: set[str] = set()  # sensors that have written down the last round
        self._gathered = self._over = time.monotonic()
        self._times = ResponseTimes(spec.sensors, spec.patience, self._gathered)
        self._paused = False
        self._awaited = ""  # what was last said about what the line waits for
        self._loss: float | None = None  # of the last round

    def run(self, stop: Callable[[], bool]) -> int:
        """To the end of the line, or until `stop` says so; return the last round that is closed. Raises: coordinate."""
        self._crier.open()
        self._handle(self._inbox.get())  # Connected: what is retained of an earlier run is replaced
        spec = self._spec
        self._report(
            progress.Gathering(
                federation=spec.federation, run=spec.run, nodes=len(spec.sensors), rounds=self._rounds, what="sensor"
            )
        )
        if self._journal.has_rounds(spec.run):
            self._model = self._serve()
        if not self._labels.count:
            self._say(f"waiting for rows in {self._labels.path}")
        self._gather()
        while not (stop() or self._is_over()):
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=self._nap()))
            self._watch_clock()
        return self.round

    def close(self) -> None:
        """Say what came of it, and disconnect."""
        if self._model:
            self._tell_protection(self._model.round)
        self._tell(anyway=True)
        if self.over:
            loss = "" if self._loss is None else f", loss {self._loss:.3f}"
            self._say(f"finished: {pluralize(self.round, 'round')}{loss}")
        if not self.round and not self._journal.has_rounds(self._spec.run):
            self._crier.withdraw()
        self._crier.close()

    @property
    def round(self) -> int:
        """The last one that is closed."""
        return self._model.round if self._model else 0

    def _nap(self) -> float:
        waits = self._collecting is None and not self._gathering and not self.over
        return _LOOK if waits else _TICK

    # Where the line goes on

    def _gather(self) -> None:
        """Ask every sensor how far it is; when all have answered the line goes on from where all can."""
        self._gathering, self._collecting, self._before, self._progress = True, None, None, {}
        self._gathered = time.monotonic()
        self._crier.say_presence(online=True)

    def _reunite(self) -> None:
        """Go on if it is known from where."""
        spec = self._spec
        expected = [name for name in spec.sensors if name not in self._progress]
        late = time.monotonic() - self._gathered > spec.patience
        if expected and (spec.absent == "wait" or not late or not self._progress or not self._reception.complete):
            return
        if not self.round:  # until the first round is closed, a sensor may still come with other columns
            self._model = self._serve()
        assert self._model
        model, target = self._model, self._model.round
        if spec.absent == "wait":
            found = find_common_round(model.progress, self._progress)
            if found is None:
                self._part_from_stragglers(model.progress)
                return
            target = found
        if target != model.round:
            self._say(f"going back from round {model.round} to round {target}, which all have on their disks")
            model.restore(target)
        self._gathering, self._attempt = False, self._journal.attempt(spec.run)
        self._times.start_attempt(expected)
        self._next()

    def _serve(self) -> HeadModel:
        """The model for the sensors that there are, as it is on the disk."""
        columns = {name: each.columns for name, each in self._reception.members.items()}
        model = HeadModel(self._spec, columns, self._labels, self._folder, self._journal, self._say, self._deploy)
        self._tell_protection(model.round)
        return model

    def _part_from_stragglers(self, ours: PartyProgress) -> None:
        for name, standing in list(self._progress.items()):
            if not set(ours.kept) & set(standing.kept):
                del self._progress[name]
                self._reception.refuse(
                    PeerError(name, f"it can go back to rounds {standing.kept}, the head to {ours.kept}", ours.round),
                    "give the sensor its --state folder back, or begin anew: edge-node vfl coordinate --new",
                )

    # Rounds

    def _next(self) -> None:
        """Open the next round if its products are there, or end the line."""
        assert self._model
        if self.over:
            self._over = time.monotonic()
            self._model.commit()
            self._model.deploy(last=True)
            self._crier.say_state("finished", self._model.round)
            return
        self._open(self._model.round + 1)

    def _open(self, round_: int) -> bool:
        """Open a round; False if its products are not there yet."""
        assert self._model
        first, last = self._span = span(self._spec.window, round_)
        if self._labels.count < last:
            self._labels.refresh()
            if self._labels.count < last:
                self._paused = True
                if time.monotonic() - max(self._times.closed, self._gathered) > _QUIET:
                    self._wait_for(f"waiting for more products in {self._labels.path}")
                return False
        since = first if self._before is None else self._before[1][1]
        pairs = sends_pairs(self._spec.denoising, round_)
        spec, sizes, gaps = self._spec, self._model.sizes, self._spec.absent != "wait"
        self._collecting = OpenRound(spec.run, self._attempt, round_, last - first, sizes, pairs=pairs, gaps=gaps)
        self._times.open_round(round_, time.monotonic())
        self._labels.drop_before(span(spec.window, min(self._model.progress.kept) + 1)[0])
        self._crier.open_round(self._collecting, self._span, since, self._labels.products(since, last))
        return True

    def embedded(self, sensor: str, frame: Embeddings) -> None:
        """Embeddings have come."""
        round_, now = self._collecting, time.monotonic()
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
        self._crier.lacks.pop(sensor, None)
        self._crier.latency[sensor] = self._times.measure(sensor, round_.arrived[sensor].costs, now)
        if not round_.find_missing(self._spec.sensors):
            self._close(round_)

    def _close(self, round_: OpenRound) -> None:
        """Say what the round trains with, open the next, and learn while the sensors do."""
        assert self._model
        model, spec, positions = self._model, self._spec, self._span
        made = model.represent(round_, *positions, timing(spec.sensors, self._times.costs))
        frame = {"run": spec.run, "attempt": round_.attempt, "round": round_.round}
        replies = [(name, encode_frame(each)) for name, each in model.replies(made, **frame)]
        self._crier.reply(replies)
        seconds = self._times.close_round(made.iterations, time.monotonic())
        self._before, self._collecting = (round_, positions, replies), None
        if round_.round != self._rounds:
            self._open(round_.round + 1)
        fact = model.train(made, round_, positions, seconds, self._times.costs)
        self._paused, self._loss = False, fact.loss
        self._crier.closed(fact)
        if self.over:
            self._next()

    @property
    def over(self) -> bool:
        """Whether the last round is closed."""
        return self._model is not None and 0 < self._rounds <= self._model.round

    def _is_over(self) -> bool:
        """Whether the last round is closed and on the disks of all who can be expected to write it there."""
        if not self.over:
            return False
        waited = time.monotonic() - self._over
        return self._done >= set(self._spec.sensors) - self._times.absent or waited > _LINGER

    # The clock

    def _watch_clock(self) -> None:
        now = time.monotonic()
        if self._collecting is not None:
            self._watch_round(self._collecting, now)
        elif self._gathering:
            if self._progress:
                self._reunite()
            if now - self._gathered > self._spec.patience and self._reception.members:
                self._pause(self.round + 1, [name for name in self._spec.sensors if name not in self._progress])
        elif not self.over:
            self._next()
        self._tell()

    def _watch_round(self, round_: OpenRound, now: float) -> None:
        missing = round_.find_missing(self._spec.sensors)
        late = self._times.find_late(missing, now)
        if late and self._spec.absent == "wait":
            self._pause(round_.round, late)
        elif late:
            self._times.absent |= set(late)
        if round_.arrived and self._spec.absent != "wait" and not set(missing) - self._times.absent:
            self._close(round_)
        elif missing and self._times.is_time_to_ask(now):
            for name in missing:
                self._ask(name)

    def _ask(self, sensor: str) -> None:
        """Say again, to this sensor alone, what is open."""
        if self._collecting:
            self._open_again(self._collecting, self._span, sensor)

    def _open_again(self, round_: OpenRound, positions: tuple[int, int], sensor: str) -> None:
        self._crier.open_round(round_, positions, positions[0], self._labels.products(*positions), sensor)

    def _pause(self, round_: int, waiting_for: list[str]) -> None:
        self._paused = True
        self._wait_for(f"round {round_} waits for {', '.join(waiting_for)}")

    def _wait_for(self, text: str) -> None:
        """Say what the line waits for, unless that was said last."""
        if text != self._awaited:
            self._awaited = text
            self._say(text)

    def _tell(self, *, anyway: bool = False) -> None:
        round_ = self.round
        present = self._reception.present - self._times.absent
        status: Stage = "finished" if self.over else "gathering" if self._gathering else "open"
        if told := self._crier.say_overview(round_, status, present, paused=self._paused, anyway=anyway):
            self._report(progress.Learning(node=topics.COORDINATOR, round=round_, rounds=self._rounds, **told))

    # What arrives

    def _handle(self, event: object) -> None:
        match event:
            case Delivery():
                self._reception.receive(event)
            case Connected():
                self._announce()
            case Disconnected(_, reason):
                self._say(f"connection lost ({reason}); trying again")

    def _announce(self) -> None:
        """(Re)publish what is retained: a broker restarted without persistence has forgotten it."""
        self._crier.say_spec()  # first: what sensors answer to our presence is about this run
        self._crier.say_presence(online=True)
        self._crier.say_state("finished" if self.over else "open", self.round)

    def finished(self, sensor: str) -> None:
        """A sensor has written down the last round."""
        if self.over:
            self._done.add(sensor)

    def came(self, sensor: str, standing: PartyProgress, *, anew: bool) -> None:
        """A sensor has said how far it is: take it along, or go back with all to where it is."""
        if anew:
            self._times.absent.discard(sensor)
        if self._model is None or self._gathering:
            self._progress[sensor] = standing
            self._reunite()
        else:
            self._bring(sensor, self._model.round - standing.round)
        if self.over and (standing.round == self.round or self._spec.absent != "wait"):
            self._reception.release(sensor)

    def _bring(self, sensor: str, behind: int) -> None:
        """Let a sensor that is so many rounds behind have what it lacks; or go back with all to where it is."""
        if behind == 1 and self._before is not None and self._before[0].round == self.round:
            round_, positions, replies = self._before
            self._open_again(round_, positions, sensor)
            self._crier.reply_again(replies, sensor)
        elif behind and self._spec.absent == "wait":
            self._gather()
            return
        self._ask(sensor)

    def _tell_protection(self, round_: int) -> None:
        if text := describe_spent(self._spec, round_):
            self._say(text)

    def _say(self, text: str) -> None:
        self._report(progress.Note(text=text))
