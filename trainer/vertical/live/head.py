"""The head of a line: MQTT and clock around what has arrived (`exchange`) and what is made of it (`server`)."""

import contextlib
import gc
import queue
import secrets
import sys
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import torch

from broker_config import disk, topics
from broker_config.endpoint import Endpoint
from broker_config.errors import PeerError
from broker_config.frames import Embeddings, encode_frame
from broker_config.link import Delivery, LinkDown, LinkUp
from broker_config.messages import Stage
from broker_config.vertical import LineSpec
from edge.words import some
from trainer import progress
from trainer.federation.herald import check_unclaimed
from trainer.vertical.denoiser import pairs_in
from trainer.vertical.live import packing
from trainer.vertical.live.crier import Crier
from trainer.vertical.live.exchange import Collecting, Costs, Standing, reunite
from trainer.vertical.live.journal import ClosedRound, Journal, adopted
from trainer.vertical.live.labels import Labels
from trainer.vertical.live.reception import Reception
from trainer.vertical.live.server import Deploy, Represent, Server, timing
from trainer.vertical.networks import embedding_size
from trainer.vertical.privacy import account
from trainer.vertical.window import span

_INBOX = 2048  # events, of up to 1 MiB
_TICK = 0.2  # seconds
_LOOK = 0.02  # seconds between two looks for new products
_AGAIN = 1.0  # seconds without an answer after which sensors are asked again, then twice as many
_LONGEST = 30.0
_QUIET = 10.0  # seconds without products after which it is said that the line waits for them
_DRIPS = 10.0  # times the patience, after which a sensor is late even though more and more of its rows come
_LINGER = 30.0  # seconds for sensors to write down the last round
_ENDED = "ended"  # file with the last round of a run
SWITCH = 5e-4  # seconds that Python's other thread may keep the network waiting


def coordinate(
    spec: LineSpec,
    labels: Path,
    endpoint: Endpoint,
    folder: Path,
    *,
    rounds: int,
    new: bool,
    report: progress.Report,
    stop: Callable[[], bool] = lambda: False,
    deploy: Deploy = lambda *_, **__: None,
) -> int:
    """Run a line's head until so many rounds are closed (0: for ever), or `stop` says so; return how many are.

    Raises:
        LinkError: the broker cannot be reached.
        UsageError: the line has a head already, or the run in `folder` has other settings.
        EdgeNodeError: the disk fails. Started again with the same folder, the line goes on.
    """
    torch.set_num_threads(spec.threads)
    sys.setswitchinterval(SWITCH)
    gc.freeze()  # else every collection goes through all of torch, in the middle of a round
    embedding_size(spec.network, (1, spec.cycles))
    known = Labels(labels, spec.classes)
    known.refresh()
    check_unclaimed(endpoint, spec.federation, ())
    with disk.claimed(folder), contextlib.closing(Journal(folder)) as journal:
        spec = adopted(journal, spec, new=new)
        if 0 < rounds <= (played := _ended(folder / spec.run)):
            more = "--rounds for more, or --new for another run"
            report(progress.Note(text=f"all {played} rounds are played: {more}"))
            return played
        head = _Head(spec, known, endpoint, folder, journal, rounds, report, deploy)
        try:
            return head.run(stop)
        finally:
            head.close()


class _Head:
    def __init__(
        self,
        spec: LineSpec,
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
        self._inbox: queue.Queue[object] = queue.Queue(_INBOX)
        session = secrets.token_hex(8)
        self._crier = Crier(endpoint, spec, session, self._inbox)
        self._reception = Reception(spec, endpoint, session, journal, self._crier, self, report)

        self._server: Server | None = None
        self._standings: dict[str, Standing] = {}  # of the sensors that have answered since we last gathered
        self._gathering, self._attempt = True, 0
        self._collecting: Collecting | None = None  # the open round
        self._span = (0, 0)
        self._before: tuple[Collecting, tuple[int, int], list[tuple[str | None, bytes]]] | None = None
        self._done: set[str] = set()  # sensors that have written down the last round
        self._absent: set[str] = set()  # that rounds no longer wait for
        self._costs: dict[str, tuple[float, float, float]] = {}  # collection, communication, iteration
        self._heard: dict[str, float] = {}  # when a sensor's embeddings last came in the open round
        self._recent: dict[int, float] = {}  # when the rounds of this attempt opened, for as long as `patience`
        self._opened = self._closed = self._asked = self._gathered = self._over = time.monotonic()
        self._silence = _AGAIN
        self._taken: tuple[int, ...] = ()  # local iterations of the round before
        self._paused = False
        self._awaited = ""  # what was last said about what the line waits for
        self._loss: float | None = None  # of the last round

    def run(self, stop: Callable[[], bool]) -> int:
        self._crier.open()
        self._handle(self._inbox.get())  # LinkUp: what is retained of an earlier run is replaced
        spec = self._spec
        self._report(
            progress.Gathering(
                federation=spec.federation, run=spec.run, nodes=len(spec.sensors), rounds=self._rounds, what="sensor"
            )
        )
        if not self._labels.count:
            self._say(f"waiting for rows in {self._labels.path}")
        self._gather()
        while not (stop() or self._is_over()):
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=self._nap()))
            self._watch_clock()
        if self.over:
            loss = "" if self._loss is None else f", loss {self._loss:.3f}"
            self._say(f"finished: {some(self.round, 'round')}{loss}")
            _end(self._folder / self._spec.run, self.round)
        return self.round

    def close(self) -> None:
        if self._server:
            self._tell_protection(self._server.round)
        self._tell(anyway=True)
        if not self.round and not self._journal.has_rounds(self._spec.run):
            self._crier.withdraw()
        self._crier.close()

    @property
    def round(self) -> int:
        """The last one that is closed."""
        return self._server.round if self._server else 0

    def _nap(self) -> float:
        waits = self._collecting is None and not self._gathering and not self.over
        return _LOOK if waits else _TICK

    # Where the line goes on

    def _gather(self) -> None:
        """Ask every sensor how far it is; when all have answered the line goes on from where all can."""
        self._gathering, self._collecting, self._before, self._standings = True, None, None, {}
        self._gathered = time.monotonic()
        self._crier.say_presence(online=True)

    def _reunite(self) -> None:
        """Go on if it is known from where."""
        spec = self._spec
        expected = [name for name in spec.sensors if name not in self._standings]
        late = time.monotonic() - self._gathered > spec.patience
        if expected and (spec.absent == "wait" or not late or not self._standings or not self._reception.complete):
            return
        if not self.round:  # until the first round is closed, a sensor may still come with other columns
            columns = {name: each.columns for name, each in self._reception.members.items()}
            self._server = Server(spec, columns, self._labels, self._folder, self._journal, self._say, self._deploy)
            self._tell_protection(self._server.round)
        assert self._server
        server, target = self._server, self._server.round
        if spec.absent == "wait":
            found = reunite(server.standing, self._standings)
            if found is None:
                self._part_from_stragglers(server.standing)
                return
            target = found
        if target != server.round:
            self._say(f"going back from round {server.round} to round {target}, which all have on their disks")
            server.restore(target)
        self._absent = set(expected)
        self._gathering, self._attempt = False, self._journal.attempt(spec.run)
        self._recent.clear()
        self._next()

    def _part_from_stragglers(self, ours: Standing) -> None:
        for name, standing in list(self._standings.items()):
            if not set(ours.kept) & set(standing.kept):
                del self._standings[name]
                self._reception.refuse(
                    PeerError(name, f"it can go back to rounds {standing.kept}, the head to {ours.kept}", ours.round),
                    "give the sensor its --state folder back, or begin anew: edge-node line coordinate --new",
                )

    # Rounds

    def _next(self) -> None:
        """Open the next round if its products are there, or end the line."""
        assert self._server
        if self.over:
            self._over = time.monotonic()
            self._server.commit()
            self._server.deploy(last=True)
            self._crier.say_state("finished", self._server.round)
            return
        self._open(self._server.round + 1)

    def _open(self, round_: int) -> bool:
        """Open a round; False if its products are not there yet."""
        assert self._server
        first, last = self._span = span(self._spec.window, round_)
        if self._labels.count < last:
            self._labels.refresh()
            if self._labels.count < last:
                self._paused = True
                if time.monotonic() - max(self._closed, self._gathered) > _QUIET:
                    self._wait_for(f"waiting for more products in {self._labels.path}")
                return False
        since = first if self._before is None else self._before[1][1]
        pairs = pairs_in(self._spec.denoising, round_)
        spec, sizes, gaps = self._spec, self._server.sizes, self._spec.absent != "wait"
        self._collecting = Collecting(spec.run, self._attempt, round_, last - first, sizes, pairs=pairs, gaps=gaps)
        self._opened = self._asked = time.monotonic()
        self._silence = _AGAIN
        self._heard.clear()
        self._recent[round_] = self._opened
        while self._opened - self._recent[oldest := next(iter(self._recent))] > spec.patience:
            del self._recent[oldest]
        self._labels.forget(span(spec.window, min(self._server.standing.kept) + 1)[0])
        for payload in self._opening(self._collecting, self._span, since):
            self._crier.publish(topics.opened(spec.federation), payload)
        return True

    def _opening(self, round_: Collecting, positions: tuple[int, int], since: int) -> list[bytes]:
        first, last = positions
        products = self._labels.products(since, last)
        frame = {"run": self._spec.run, "attempt": round_.attempt, "round": round_.round}
        return [encode_frame(each) for each in packing.opened(first, last, since, products, **frame)]

    def embedded(self, sensor: str, frame: Embeddings) -> None:
        """Embeddings have come."""
        round_, now = self._collecting, time.monotonic()
        if round_ is None:
            return
        before = round_.rows(sensor)
        whole = round_.take(sensor, frame)
        if frame.attempt != round_.attempt:
            return
        ended = whole or (frame.round < round_.round and frame.part == frame.parts - 1)
        if ended and now - self._recent.get(frame.round, -inf) < self._spec.patience:
            self._absent.discard(sensor)  # so fast that it is worth waiting for, even if its round is over
        if whole or round_.rows(sensor) > before:
            self._heard[sensor] = now
        if not whole:
            return
        self._crier.lacks.pop(sensor, None)
        self._cost(sensor, round_.arrived[sensor].costs, now - self._opened)
        if not round_.waits_for(self._spec.sensors):
            self._close(round_)

    def _cost(self, sensor: str, costs: Costs, latency: float) -> None:
        """A round opens while sensors still train in the one before it: that is no time of the network's."""
        assert self._server
        trained = 0.0
        if self._taken:
            trained = self._taken[self._spec.sensors.index(sensor)] * costs.iteration
        communication = max(0.0, latency - trained - costs.collection - costs.embedding)
        self._costs[sensor] = costs.collection, communication, costs.iteration
        self._crier.latency[sensor] = latency

    def _close(self, round_: Collecting) -> None:
        """Say what the round trains with, open the next, and learn while the sensors do."""
        assert self._server
        server, spec, positions = self._server, self._spec, self._span
        made = server.represent(round_, *positions, timing(spec.sensors, self._costs))
        frame = {"run": spec.run, "attempt": round_.attempt, "round": round_.round}
        replies = [(name, encode_frame(each)) for name, each in server.replies(made, **frame)]
        for name, payload in replies:
            self._crier.publish(self._topic(name), payload)
        self._before, self._collecting, self._taken = (round_, positions, replies), None, made.iterations
        if round_.round != self._rounds:
            self._open(round_.round + 1)
        fact = self._fact(round_, made, positions, server.loss(made))
        server.learn(made, fact)
        self._paused, self._loss = False, fact.loss
        self._crier.closed(fact)
        if self.over:
            self._next()

    def _topic(self, sensor: str | None) -> str:
        federation = self._spec.federation
        return topics.representation(federation) if sensor is None else topics.gradients(federation, sensor)

    def _fact(self, round_: Collecting, made: Represent, positions: tuple[int, int], loss: float) -> ClosedRound:
        now, before = time.monotonic(), self._closed
        self._closed = now
        there = {name: self._costs[name] for name in round_.arrived}
        return ClosedRound(
            round=round_.round,
            attempt=round_.attempt,
            first=positions[0],
            last=positions[1],
            iterations=made.iterations,
            loss=loss,
            seconds=now - before,
            collection={name: costs[0] for name, costs in there.items()},
            communication={name: costs[1] for name, costs in there.items()},
            iteration={name: costs[2] for name, costs in there.items()},
        )

    @property
    def over(self) -> bool:
        """Whether the last round is closed."""
        return self._server is not None and 0 < self._rounds <= self._server.round

    def _is_over(self) -> bool:
        """Whether the last round is closed and on the disks of all who can be expected to write it there."""
        if not self.over:
            return False
        waited = time.monotonic() - self._over
        return self._done >= set(self._spec.sensors) - self._absent or waited > _LINGER

    # The clock

    def _watch_clock(self) -> None:
        now = time.monotonic()
        if self._collecting is not None:
            self._watch_round(self._collecting, now)
        elif self._gathering:
            if self._standings:
                self._reunite()
            if now - self._gathered > self._spec.patience and self._reception.members:
                self._pause(self.round + 1, [name for name in self._spec.sensors if name not in self._standings])
        elif not self.over:
            self._next()
        self._tell()

    def _watch_round(self, round_: Collecting, now: float) -> None:
        missing = round_.waits_for(self._spec.sensors)
        patience = self._spec.patience
        drips = now - self._opened > _DRIPS * patience
        late = [name for name in missing if drips or now - self._heard.get(name, self._opened) > patience]
        if late and self._spec.absent == "wait":
            self._pause(round_.round, late)
        elif late:
            self._absent |= set(late)
        if round_.arrived and self._spec.absent != "wait" and not set(missing) - self._absent:
            self._close(round_)
        elif missing and now - max([self._asked, *self._heard.values()]) > self._silence:
            self._asked, self._silence = now, min(_LONGEST, 2 * self._silence)
            for name in missing:
                self._ask(name)

    def _ask(self, sensor: str) -> None:
        """Say again, to this sensor alone, what is open."""
        if self._collecting:
            for payload in self._opening(self._collecting, self._span, self._span[0]):
                self._crier.publish(topics.gradients(self._spec.federation, sensor), payload)

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
        present = self._reception.present - self._absent
        status: Stage = "finished" if self.over else "gathering" if self._gathering else "open"
        if told := self._crier.say_overview(round_, status, present, paused=self._paused, anyway=anyway):
            self._report(progress.Learning(node=topics.COORDINATOR, round=round_, rounds=self._rounds, **told))

    # What arrives

    def _handle(self, event: object) -> None:
        match event:
            case Delivery():
                self._reception.receive(event)
            case LinkUp():
                self._announce()
            case LinkDown(_, reason):
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

    def came(self, sensor: str, standing: Standing, *, anew: bool) -> None:
        """A sensor has said how far it is: take it along, or go back with all to where it is."""
        if anew:
            self._absent.discard(sensor)
        if self._server is None or self._gathering:
            self._standings[sensor] = standing
            self._reunite()
            return
        behind = self._server.round - standing.round
        if behind == 1 and self._before is not None and self._before[0].round == self._server.round:
            round_, positions, replies = self._before
            for payload in self._opening(round_, positions, positions[0]):
                self._crier.publish(topics.gradients(self._spec.federation, sensor), payload)
            for name, payload in replies:
                if name in (None, sensor):
                    self._crier.publish(topics.gradients(self._spec.federation, sensor), payload)
        elif behind and self._spec.absent == "wait":
            self._gather()
            return
        if self.over:
            self._crier.say_state("finished", self._server.round)
        self._ask(sensor)

    def _tell_protection(self, round_: int) -> None:
        if text := account(self._spec, round_):
            self._say(text)

    def _say(self, text: str) -> None:
        self._report(progress.Note(text=text))


def _end(folder: Path, round_: int) -> None:
    """Remember that a run has ended for all, with this round."""
    with disk.writing(folder):
        disk.replace_bytes(folder / _ENDED, str(round_).encode())


def _ended(folder: Path) -> int:
    """The round with which a run has ended; 0 if it has not."""
    path = folder / _ENDED
    return int(path.read_text()) if path.exists() else 0
