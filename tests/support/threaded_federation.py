"""Coordinator and nodes of a federation as threads of the tests' process, over a real broker."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from safetensors.numpy import load_file

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.messages import Codec, Encryption, Head
from broker_config.protocol.topics import COORDINATOR
from broker_config.security.message_signing import MessageSigner
from tests.support.plants import CLASSES, load_images
from tests.support.waiting import PATIENCE
from trainer import progress
from trainer.data.class_folders import Images
from trainer.federation.client.session import take_part
from trainer.federation.server.coordinator.process import Outcome, abort, coordinate
from trainer.federation.server.journal import history
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.operator_actions import request
from trainer.federation.server.spec import Participation, Request, draft
from trainer.models.catalogue import ONLY_SIZE
from trainer.models.named_tensors import Arrays

PLANTS = ("plant-a", "plant-b", "plant-c")


class Session:
    """One process's part of a federation, in a thread: what it tells, its end,
    and a way to stop it.
    """

    def __init__(self, pool: ThreadPoolExecutor, part: Callable[["Session"], object]):
        self._stop, self._deadline = threading.Event(), time.monotonic() + PATIENCE
        self._events: queue.Queue[progress.AnyEvent] = queue.Queue()
        self.told: list[progress.AnyEvent] = []
        self._end: Future[object] = pool.submit(part, self)

    def report(self, event: progress.AnyEvent) -> None:
        self._events.put(event)

    def notes(self) -> str:
        """All that it has told in words and nobody has waited for."""
        events = [self._events.get() for _ in range(self._events.qsize())]
        return "\n".join(each.text for each in events if isinstance(each, progress.Note))

    def ask(self) -> None:
        self._stop.set()

    def asked(self) -> bool:
        return self._stop.is_set() or time.monotonic() > self._deadline

    def wait_for(self, wanted: progress.AnyEvent | type) -> progress.AnyEvent:
        """The next event that equals `wanted`, or is one."""
        while True:
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                assert not self._end.done(), (wanted, self._end.result(), self.told)
                assert time.monotonic() < self._deadline, (wanted, self.told)
                continue
            self.told.append(event)
            if event == wanted or (isinstance(wanted, type) and isinstance(event, wanted)):
                return event

    def all_told(self) -> list[progress.AnyEvent]:
        """What it has told so far."""
        while not self._events.empty():
            self.told.append(self._events.get())
        return self.told

    def has_ended(self) -> bool:
        """Whether it has, in order or not."""
        return self._end.done()

    def stop(self) -> object:
        self.ask()
        return self.end()

    def end(self) -> object:
        return self._end.result(PATIENCE)


def end_all(sessions: Sequence[Session]) -> None:
    """Wait until all have ended in order. The first error ends them all, and is raised."""
    try:
        for ended in as_completed([each._end for each in sessions], PATIENCE):
            ended.result()
    finally:
        for each in sessions:
            each.ask()
        wait([each._end for each in sessions], PATIENCE)


class Federation:
    """A spec and its first broadcast, and whoever takes part in it,
    at one broker or each by a way of its own.
    """

    def __init__(
        self,
        broker: Endpoint | Mapping[str, Endpoint],
        plants: dict[str, Path],
        folder: Path,
        name: str,
        rounds: int,
        participation: Participation,
        method: str = "afedcl",
        signers: Mapping[str, MessageSigner] | None = None,
        model: str = "small",
        codec: Codec = "none",
        encryption: Encryption = "none",
        telemetry: bool = False,
        secure_aggregation: bool = False,
        head: Head = "trained",
        nodes: int = len(PLANTS),
        **options: str,
    ):
        # a texture network's stem is then seen once
        training = {"local_epochs": 1, "augment": model not in ONLY_SIZE}
        request = Request(
            method,
            options,
            model,
            "none",
            ONLY_SIZE.get(model, 32),
            training,
            rounds=rounds,
            seed=7,
            codec=codec,
            secure_aggregation=secure_aggregation,
            head=head,
        )
        self.spec, self.first = draft(
            request,
            federation=name,
            classes=CLASSES,
            nodes=nodes,
            participation=participation,
            encryption=encryption,
        )
        self._telemetry = telemetry
        self._broker, self._plants, self.folder = broker, plants, folder
        self._signers = signers or {}
        self._pool = ThreadPoolExecutor(8)

    def endpoint(self, member: str) -> Endpoint:
        """The broker, as this member reaches it."""
        broker = self._broker if isinstance(self._broker, Endpoint) else self._broker[member]
        return replace(broker, signer=self._signers.get(member))

    def images(self, name: str) -> Images:
        return load_images(self.spec, self._plants[name])

    def coordinator(self, linger: float = 0, *, new: bool = False) -> Session:
        """A coordinator's session that has begun to gather nodes."""
        session = self.start_coordinator(linger, new=new)
        session.wait_for(progress.Gathering)
        return session

    def start_coordinator(self, linger: float = 0, *, new: bool = False) -> Session:
        """A coordinator's session."""

        def part(session: Session) -> Outcome | None:
            with Ledger(self.folder / "coordinator") as ledger:
                return coordinate(
                    ledger,
                    self.spec,
                    self.first,
                    self.endpoint(COORDINATOR),
                    session.report,
                    linger=linger,
                    stop=session.asked,
                    new=new,
                )

        return Session(self._pool, part)

    @contextmanager
    def opened_by(self, nodes: int, coordinator: Session) -> Iterator[None]:
        """Let the first round open when so many nodes, which are started within,
        have joined: not with the quorum.
        """
        request(self.folder / "coordinator", "pause", "tester")
        coordinator.wait_for(progress.Note)

        def open_round() -> None:
            for _ in range(nodes):
                coordinator.wait_for(progress.NodeJoined)
            request(self.folder / "coordinator", "resume", "tester")

        opening = self._pool.submit(open_round)
        yield
        opening.result(PATIENCE)

    def node(
        self, name: str, until: Callable[[progress.AnyEvent], bool] = lambda _: False
    ) -> Session:
        """A node's session; it stops by itself once it has reported an event `until` which it
        lasts.
        """

        spec = self.spec  # as it is now: a test may change it for the next node

        def part(session: Session) -> Path | None:
            def report(event: progress.AnyEvent) -> None:
                session.report(event)
                if until(event):
                    session.ask()

            return take_part(
                spec,
                name,
                self.images(name),
                self.endpoint(name),
                self.folder / name,
                telemetry=self._telemetry,
                report=report,
                stop=session.asked,
            )

        return Session(self._pool, part)

    def abort(self) -> None:
        with Ledger(self.folder / "coordinator") as ledger:
            abort(ledger, self.endpoint(COORDINATOR), "a trial")

    def personal(self, name: str) -> Arrays:
        tensors: Arrays = load_file(self.folder / name / "model" / "personal.safetensors")
        return tensors

    def contributors(self) -> list[set[str]]:
        return [set(line.weights) for line in history(self.folder / "coordinator")]


def same(left: Arrays, right: Arrays) -> bool:
    return left.keys() == right.keys() and all(
        left[name].tobytes() == right[name].tobytes() for name in left
    )
