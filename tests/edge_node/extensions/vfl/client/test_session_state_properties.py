"""Sensors' sessions beside a model of their head, over a network that loses, repeats,
delays and reorders.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker_config.protocol.messages import Finished, Presence, RoundState, Welcome
from edge_node.extensions.vfl.client.session_state import (
    Answer,
    CannotRewind,
    Described,
    DescribeMissing,
    Effect,
    Embed,
    Event,
    FinishRound,
    Idle,
    KeepProducts,
    Learn,
    Learnt,
    Online,
    ProductsUnknown,
    ReadRows,
    Replied,
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
from edge_node.extensions.vfl.client.target_round import ProductPositions, positions_to_keep
from edge_node.extensions.vfl.frames import Opened, Represented
from edge_node.extensions.vfl.messages import VflSpec, Window

NAMES = ("press", "oven")
ROUNDS, COMMIT, KEPT, PARTS = 20, 2, 2, 2
FATES = st.sampled_from(("arrives",) * 6 + ("is lost", "is late", "is repeated", "is damaged"))
PRODUCTS = [f"p{position}" for position in range(100)]
RUN = "0" * 16


class Hello(NamedTuple):
    session: str
    round: int
    kept: frozenset[int]


class Sent(NamedTuple):
    """A sensor's embeddings."""

    session: str
    attempt: int
    round: int
    value: int


class Network:
    """What is under way from or to a sensor."""

    def __init__(self) -> None:
        self.under_way: list[tuple[str, Any]] = []
        self.sent: list[tuple[str, Any]] = []  # ever
        self.retained: list[Any] = []  # what a sensor hears that connects

    def send(self, sensor: str, *messages: object) -> None:
        new = [(sensor, message) for message in messages]
        self.under_way += new
        self.sent += new

    def broadcast(self, *messages: object) -> None:
        for name in NAMES:
            self.send(name, *messages)

    def retain(self, message: object) -> None:
        self.retained = [each for each in self.retained if type(each) is not type(message)] + [
            message
        ]
        self.broadcast(message)

    def connect(self, sensor: str) -> None:
        """For the first time or again: what was under way is lost, and what is retained comes."""
        self.under_way = [each for each in self.under_way if each[0] != sensor]
        self.send(sensor, *self.retained)


class Disk:
    """Checkpoints, of which the last are kept: models by the rounds at whose ends they were
    made.
    """

    def __init__(self) -> None:
        self.models = {0: 0}

    @property
    def last(self) -> tuple[int, int]:
        """What a process that starts begins with."""
        return max(self.models.items(), default=(0, 0))

    def save(self, round_: int, model: int) -> None:
        self.drop(round_)
        self.models = dict([*self.models.items(), (round_, model)][-KEPT:])

    def drop(self, since: int) -> None:
        self.models = {round_: model for round_, model in self.models.items() if round_ < since}


class Sensor:
    """A sensor's process: the state machine, and a trainer whose model is a hash of all that it
    has learnt.
    """

    def __init__(
        self,
        spec: VflSpec,
        name: str,
        network: Network,
        disk: Disk,
        session: str,
        rows: int,
        now: float,
    ):
        self.spec, self.name, self.network, self.disk, self.session = (
            spec,
            name,
            network,
            disk,
            session,
        )
        self.rows, self.now = rows, now  # the rows that its file has by now
        self.round, self.model = disk.last
        self.positions = ProductPositions()
        self.sent: Sent | None = None
        self.parts: set[int] = set()
        self.learnt: list[tuple[int, int, int]] = []  # attempt, round, model
        self.state = start(spec, name, session, self.round, now)
        self.feed(Online())

    def feed(self, event: Event) -> None:
        events, was_over = [event], self.state.over
        while events:
            self.state, effects = advance(self.state, events.pop(0))
            events += [answer for effect in effects if (answer := self.perform(effect)) is not None]
        if self.state.over and not was_over and self.round not in self.disk.models:
            self.disk.save(self.round, self.model)

    def receive(self, message: object) -> None:
        match message:
            case Opened():
                self.feed(RoundOpened(message, self.now))
            case Represented():
                self.feed(Replied(message, self.now))
            case Welcome() | Finished() | Presence() | RoundState():
                self.feed(Told(message))

    def perform(self, effect: Effect) -> Answer | None:
        match effect:
            case KeepProducts(frame):
                self.positions.put(
                    frame.since, frame.products, positions_to_keep(self.spec, frame.round)
                )
            case ReadRows(frame, _, reply):
                products = self.positions.get(frame.first, frame.last)
                if products is None:
                    return ProductsUnknown()
                return RowsRead(
                    products, frozenset(products) - set(PRODUCTS[: self.rows]), reply, self.now
                )
            case Embed(frame, products, _):
                assert products == PRODUCTS[slice(*self.spec.window.span(frame.round))]
                value = hash((self.name, frame.round, self.model))
                self.sent, self.parts = Sent(self.session, frame.attempt, frame.round, value), set()
            case Send():
                assert self.sent
                self.network.send(self.name, self.sent)
            case Learn(frame):
                return self.learn(frame)
            case FinishRound(round_):
                self.round = round_
                if round_ % COMMIT == 0:
                    self.disk.save(round_, self.model)
            case SayHello(round_):
                self.network.send(
                    self.name, Hello(self.session, round_, frozenset(self.disk.models))
                )
            case Rewind(frame):
                return self.rewind(frame)
            case SkipTo(round_):
                self.round = round_
            case DescribeMissing():
                return Described("rows")
        return None

    def learn(self, frame: Any) -> Answer | None:
        assert self.sent
        assert (frame.attempt, frame.round) == self.sent[1:3]
        self.parts.add(frame.part)
        if len(self.parts) < PARTS:
            return None
        if frame.iterations[NAMES.index(self.name)]:
            self.model = hash((self.name, self.model, frame.round, frame.head))
        self.learnt.append((frame.attempt, frame.round, self.model))
        return Learnt(self.now)

    def rewind(self, frame: Opened) -> Answer:
        """As SensorTrainer.rewind does."""
        before, waits = frame.round - 1, self.spec.absent == "wait"
        kept = [each for each in self.disk.models if each <= before]
        if before != self.round and (before in kept or (kept and not waits)):
            self.round = max(kept)
            self.model = self.disk.models[self.round]
        elif before != self.round and waits:
            return CannotRewind()
        self.disk.drop(frame.round)
        return Rewound(frame, self.round, self.now)


class Head:
    """What a head does, by docs/protocol.md; its timers expire when the test says so."""

    def __init__(self, spec: VflSpec, network: Network):
        self.spec, self.network, self.disk, self.attempt = spec, network, Disk(), 0
        self.waits = spec.absent == "wait"
        self.restart()

    def restart(self) -> None:
        """Killed, and started again from its disk."""
        self.round, self.model = self.disk.last
        self.sessions: dict[str, str] = {}
        self.network.retain(Presence(session="b" * 16, online=False))
        self.gather()

    def gather(self) -> None:
        self.progress: dict[str, Hello] | None = {}
        self.arrived: dict[str, int] | None = None  # of the open round
        self.replies: Sequence[Represented] = ()  # of the round before
        self.network.retain(Presence(session="b" * 16, online=True))

    def receive(self, name: str, message: object) -> None:
        match message:
            case Hello(session):
                self.sessions[name] = session
                self.network.send(name, Welcome(session=session))
                self.catch_up(name, message)
                if (
                    self.is_over
                    and self.progress is None
                    and (message.round == self.round or not self.waits)
                ):
                    self.network.send(name, Finished(session=session, run=RUN))
            case Sent(session, attempt, round_, value) if session == self.sessions.get(name):
                if self.arrived is not None and (attempt, round_) == (self.attempt, self.round + 1):
                    self.arrived[name] = value
                    if len(self.arrived) == len(NAMES):
                        self.close_round(self.arrived)

    @property
    def is_over(self) -> bool:
        return self.round == ROUNDS

    def catch_up(self, name: str, hello: Hello) -> None:
        behind = self.round - hello.round
        if self.progress is not None:
            self.progress[name] = hello
            if len(self.progress) == len(NAMES):
                self.resume(self.progress)
        elif behind == 1 and self.replies:
            self.network.send(name, self.opening(self.round, whole=True), *self.replies)
            self.ask(name)
        elif behind and self.waits:
            self.gather()
        else:
            self.ask(name)

    def resume(self, progress: dict[str, Hello]) -> None:
        """Go on from the newest round that all can be at."""
        if self.waits and any(each.round != self.round for each in progress.values()):
            self.round = max(
                self.disk.models.keys()
                & frozenset.intersection(*(each.kept for each in progress.values()))
            )
            self.model = self.disk.models[self.round]
        self.progress, self.attempt = None, self.attempt + 1
        self.open_round()

    def open_round(self) -> None:
        if self.is_over:
            self.disk.save(self.round, self.model)
            self.network.retain(RoundState(run=RUN, round=self.round, status="finished"))
            return
        self.arrived = {}
        self.network.broadcast(self.opening(self.round + 1, whole=not self.replies))

    def opening(self, round_: int, *, whole: bool) -> Opened:
        first, last = self.spec.window.span(round_)
        since = first if whole else last - self.spec.window.chunk
        names = tuple(PRODUCTS[since:last])
        return Opened(
            run=RUN,
            attempt=self.attempt,
            round=round_,
            first=first,
            last=last,
            since=since,
            products=names,
        )

    def close_round(self, arrived: dict[str, int]) -> None:
        value = str(hash((self.model, self.round, *sorted(arrived.items())))).encode()
        steps = tuple(int(name in arrived) for name in NAMES)
        self.round += 1
        self.model = hash((self.model, value))
        self.replies = [
            Represented(
                run=RUN,
                attempt=self.attempt,
                round=self.round,
                row=part,
                head=value,
                embeddings=(),
                labels=b"",
                iterations=steps,
                part=part,
                parts=PARTS,
            )
            for part in range(PARTS)
        ]
        self.network.broadcast(*self.replies)
        self.arrived = None
        if self.round % COMMIT == 0:
            self.disk.save(self.round, self.model)
        self.open_round()

    def ask(self, name: str) -> None:
        if self.arrived is not None:
            self.network.send(name, self.opening(self.round + 1, whole=True))

    def ask_again(self) -> None:
        """Those that have not answered."""
        if self.progress is not None:
            self.network.broadcast(Presence(session="b" * 16, online=True))
        for name in set(NAMES) - (self.arrived or {}).keys():
            self.ask(name)

    def lose_patience(self) -> None:
        """Go on without those that are late, where that is allowed."""
        if not self.waits and self.progress:
            self.resume(self.progress)
        elif not self.waits and self.arrived:
            self.close_round(self.arrived)


class Sessions(RuleBasedStateMachine):
    """Head and sensors, killed and cut off at any time."""

    @initialize(absent=st.sampled_from(("wait", "last")), rows=st.integers(0, 60))
    def begin(self, absent: Any, rows: int) -> None:
        self.spec = VflSpec(
            federation="plant",
            run=RUN,
            software="",
            sensors=NAMES,
            network="dense",
            classes=("a", "b"),
            window=Window(start=4, chunk=2, size=6),
            commit=COMMIT,
            absent=absent,
            patience=4.0,
        )
        self.network, self.now, self.started = Network(), 100.0, 0
        self.outcomes: dict[tuple[str, int], int] = {}  # what a round has led a sensor to
        self.head = Head(self.spec, self.network)
        self.sensors: dict[str, Sensor] = {}
        for name in NAMES:
            self.start(name, Disk(), rows)

    def start(self, name: str, disk: Disk, rows: int) -> None:
        self.started += 1
        session = f"{self.started:016x}"
        self.sensors[name] = Sensor(self.spec, name, self.network, disk, session, rows, self.now)
        self.network.connect(name)

    # What the network does

    @rule(steps=st.integers(1, 12))
    def all_goes_well_for_a_while(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @rule(fates=st.lists(FATES, min_size=1, max_size=40))
    def messages_travel(self, fates: list[str]) -> None:
        for fate in fates[: len(self.network.under_way)]:
            name, message = self.network.under_way.pop(0)
            if fate in ("arrives", "is repeated"):
                self.deliver(name, message)
            if fate in ("is late", "is repeated"):
                self.network.send(name, message)
            if fate == "is damaged":
                self.sensors[name].feed(Unusable("some topic", "it is damaged"))
        for sensor in self.sensors.values():
            sensor.feed(Idle(self.now))

    @rule(ages=st.lists(st.integers(1, 40), min_size=1, max_size=10))
    def old_messages_come_again(self, ages: list[int]) -> None:
        for name, message in [
            self.network.sent[-age] for age in ages if age <= len(self.network.sent)
        ]:
            self.deliver(name, message)

    @rule(name=st.sampled_from(NAMES))
    def a_sensor_connects_again(self, name: str) -> None:
        self.network.connect(name)
        self.sensors[name].feed(Online())

    # What the parties do

    @rule(seconds=st.sampled_from((0.01, 0.3, 3.0, 15.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for sensor in self.sensors.values():
            sensor.now = self.now

    @rule(name=st.sampled_from(NAMES), rows=st.integers(1, 6))
    def rows_come(self, name: str, rows: int) -> None:
        self.sensors[name].rows += rows

    @rule()
    def the_head_asks_again(self) -> None:
        self.head.ask_again()

    @rule()
    def the_head_loses_patience(self) -> None:
        self.head.lose_patience()

    @rule(name=st.sampled_from(NAMES))
    def a_sensor_is_killed_and_starts_again(self, name: str) -> None:
        sensor = self.sensors[name]
        self.start(name, sensor.disk, sensor.rows)

    @rule()
    def the_head_is_killed_and_starts_again(self) -> None:
        self.head.restart()

    @precondition(lambda self: self.spec.absent != "wait")
    @rule()
    def the_head_starts_again_from_an_old_copy(self) -> None:
        """Of its state folder."""
        self.head.disk.models = {0: 0}
        self.head.restart()

    # What is promised

    @invariant()
    def the_state_says_where_the_model_is(self) -> None:
        for sensor in self.sensors.values():
            assert sensor.state.round == sensor.round
            target = sensor.state.target
            if target is not None:
                assert (target.frame.attempt, target.frame.round) == (
                    sensor.state.attempt,
                    sensor.round + 1,
                )
                assert target.frame.round <= ROUNDS
                if target.sent:
                    assert sensor.sent
                    assert sensor.sent[:3] == (
                        sensor.session,
                        target.frame.attempt,
                        target.frame.round,
                    )

    @invariant()
    def no_round_is_learnt_from_twice_unless_the_head_goes_back(self) -> None:
        for sensor in self.sensors.values():
            order = [each[:2] for each in sensor.learnt]
            assert order == sorted(set(order))

    @invariant()
    def where_all_are_waited_for_a_round_always_leads_to_the_same(self) -> None:
        if self.spec.absent == "wait":
            for name, sensor in self.sensors.items():
                for _, round_, model in sensor.learnt:
                    assert self.outcomes.setdefault((name, round_), model) == model
                assert sensor.model == (self.outcomes[name, sensor.round] if sensor.round else 0)

    @invariant()
    def a_session_ends_only_after_the_last_round(self) -> None:
        for sensor in self.sensors.values():
            if sensor.state.over and self.spec.absent == "wait":
                assert sensor.round == ROUNDS
                assert max(sensor.disk.models) == ROUNDS

    def teardown(self) -> None:
        """Once nothing is lost any more and all rows are there, it ends."""
        if not hasattr(self, "head"):
            return
        for name in NAMES:
            self.rows_come(name, len(PRODUCTS))
            self.a_sensor_connects_again(name)
        for _ in range(400):
            self.step()
            for name, sensor in self.sensors.items():
                if sensor.state.over and (self.head.progress is not None or not self.head.is_over):
                    # the head says that it is to be started again
                    self.start(name, sensor.disk, sensor.rows)
            if self.head.is_over and all(each.state.over for each in self.sensors.values()):
                break
        else:
            raise AssertionError(
                f"it does not end: {[each.state for each in self.sensors.values()]}"
            )
        self.check_all()

    def check_all(self) -> None:
        self.the_state_says_where_the_model_is()
        self.no_round_is_learnt_from_twice_unless_the_head_goes_back()
        self.where_all_are_waited_for_a_round_always_leads_to_the_same()
        self.a_session_ends_only_after_the_last_round()

    def step(self) -> None:
        """What is under way arrives, all look what is to be done, and the head asks again."""
        for _ in range(len(self.network.under_way)):
            self.deliver(*self.network.under_way.pop(0))
        self.time_passes(0.3)
        for sensor in self.sensors.values():
            sensor.feed(Idle(self.now))
        self.head.ask_again()

    def deliver(self, name: str, message: Any) -> None:
        match message:
            case Hello() | Sent():
                self.head.receive(name, message)
            case _:
                self.sensors[name].receive(message)


Sessions.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_sessions_keep_their_promises = Sessions.TestCase
