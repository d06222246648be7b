"""The head's state machine beside a model of sensors that lose, repeat and forget.

What travels is lost, repeated and reordered; head and sensors are killed, and start again from what
was on their disks or from an older copy of it. A model is the list of rounds that it has learnt
from: what it was trained on is certain if that is the same for all who take part in a round.
"""

from collections import deque
from itertools import count
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_node.extensions.vfl.checkpoint import KEPT
from edge_node.extensions.vfl.messages import VflHello
from edge_node.extensions.vfl.server.head_state import (
    Admit,
    Begin,
    Close,
    Effect,
    Embedded,
    Event,
    Excluded,
    Finish,
    Finished,
    Gather,
    HeadState,
    Joined,
    Lacking,
    Load,
    Loaded,
    Lost,
    Member,
    Open,
    Opened,
    PartyProgress,
    Plan,
    Refuse,
    Reject,
    RepeatOpening,
    RepeatRound,
    Restore,
    Saved,
    SendEnd,
    Started,
    Tick,
    Train,
    Trained,
    Welcome,
    advance,
)

SENSORS = ("lamp", "oven", "press")
COMMIT = 2  # rounds
PARTS = 2  # frames in which a sensor's embeddings come


class Told(NamedTuple):
    """A message. A head's opening and replies have no text of their own."""

    kind: str  # presence, opening, reply, end; hello, embeddings, done, will
    session: int = 0  # of the sensor
    attempt: int = 0
    round: int = 0
    part: int = 0
    learnt: tuple[int, ...] = ()  # what has made the embeddings
    kept: tuple[int, ...] = ()


class Party:
    """A process that learns: what of it is on the disk, and older copies of that."""

    def __init__(self) -> None:
        self.disk: tuple[int, ...] = (0,)  # checkpoints
        self.copies = [self.disk]
        self.learnt: tuple[int, ...] = ()
        self.runs = False

    @property
    def round(self) -> int:
        return self.learnt[-1] if self.learnt else 0

    def save(self, disk: tuple[int, ...]) -> None:
        self.disk = disk[-KEPT:]
        self.copies.append(self.disk)

    def restore(self, round_: int) -> None:
        assert round_ in self.disk
        self.save(tuple(each for each in self.disk if each <= round_))
        self.learnt = tuple(range(1, round_ + 1))

    def learn(self, round_: int) -> None:
        self.learnt = (*self.learnt, round_)
        if round_ % COMMIT == 0:
            self.commit()

    def commit(self) -> None:
        if self.round not in self.disk:
            self.save((*self.disk, self.round))

    def start(self) -> None:
        self.runs = True
        self.restore(max(self.disk))


class ModelSensor(Party):
    """A sensor, as far as the head has to do with it."""

    def __init__(self, waits: bool, sessions: "count[int]"):
        super().__init__()
        self.out: deque[Told] = deque()  # what it says that is not lost
        self.frames: list[Told] = []  # what may be
        self._waits, self._sessions = waits, sessions
        self.session, self.attempt, self.open, self.ended = 0, -1, 0, False

    def start(self) -> None:
        super().start()
        self.session, self.attempt, self.open, self.ended = next(self._sessions), -1, 0, False
        self.say_hello()

    def say(self, kind: str, **fields: Any) -> None:
        self.out.append(Told(kind, self.session, **fields))

    def say_hello(self) -> None:
        if self.runs:
            self.say("hello", round=self.round, kept=self.disk)

    def die(self) -> None:
        """A broker says so, after all that it has said."""
        self.say("will")
        self.runs = False

    def receive(self, told: Told) -> None:
        match told.kind:
            case "presence":
                self.say_hello()
            case "opening":
                self.take_opening(told)
            case "reply" if (told.attempt, told.round) == (self.attempt, self.open):
                self.open = 0
                self.learn(told.round)
            case "end" if told.session == self.session:
                self.commit()
                self.say("done")
                self.ended, self.runs = True, False

    def take_opening(self, told: Told) -> None:
        begin = told.round - 1
        if told.attempt < self.attempt or (told.attempt == self.attempt and begin < self.round):
            return
        if told.attempt > self.attempt:
            self.open = 0
            if begin != self.round and begin not in self.disk and self._waits:
                self.say_hello()
                return
            if begin in self.disk and (begin != self.round or max(self.disk) > begin):
                self.restore(begin)
        self.attempt = told.attempt
        if begin > self.round:
            if self._waits:
                self.say_hello()
                return
            self.open = 0
        self.open = told.round
        self.frames += [
            Told("embeddings", self.session, self.attempt, self.open, part, self.learnt)
            for part in range(PARTS)
        ]


class Federation(RuleBasedStateMachine):
    """One head, and what travels between it and its sensors."""

    @initialize(sensors=st.integers(1, 3), rounds=st.integers(1, 7), waits=st.booleans())
    def begin(self, sensors: int, rounds: int, waits: bool) -> None:
        sessions, self.attempts = count(1), count(1)
        self.plan = Plan(SENSORS[:sensors], rounds, waits)
        self.sensors = {name: ModelSensor(waits, sessions) for name in self.plan.sensors}
        self.members: dict[str, Member] = {}  # journalled
        self.disk = Party()
        self.down: list[tuple[str, Told]] = []  # frames to sensors
        self.calls: list[tuple[str, Told]] = []  # what they are sent that is not lost
        self.now, self.products = 0.0, rounds
        self.start_head()

    # The head's process

    def start_head(self) -> None:
        self.disk.start()
        self.attempt, self.open, self.closed, self.sessions = 0, 0, 0, dict[str, int]()
        self.parts: dict[str, set[int]] = {}
        self.state = HeadState(self.plan, self.now, self.now, dict(self.members))
        self.events: deque[Event] = deque()
        self.happens(Started(self.progress, self.now))

    @property
    def progress(self) -> PartyProgress:
        return PartyProgress(self.disk.round, self.disk.disk)

    def happens(self, event: Event) -> None:
        if self.state.ended:
            return  # and so has the process
        self.events.append(event)
        while self.events:
            self.state, effects = advance(self.state, self.events.popleft())
            for effect in effects:
                self.perform(effect)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Gather():
                self.open = self.closed = 0
                self.calls += [(name, Told("presence")) for name in self.sensors]
            case Load():
                self.events.append(Loaded(self.progress, self.now))
            case Restore(round_):
                assert self.plan.waits, "the others do not wait for anybody to go back"
                self.disk.restore(round_)
            case Begin():
                self.attempt = next(self.attempts)
            case Open(round_):
                assert self.open == 0
                assert round_ == (self.closed or self.disk.round) + 1
                if self.products < round_:
                    self.events.append(Lacking("labels.csv", self.now, self.now))
                    return
                self.open, self.parts = round_, {name: set() for name in self.sensors}
                self.announce(round_, *self.sensors)
                self.events.append(Opened(round_, self.now))
            case Close(round_):
                assert round_ == self.open == self.disk.round + 1
                there = {name for name, parts in self.parts.items() if len(parts) == PARTS}
                assert (
                    there == set(self.sensors)
                    if self.plan.waits
                    else there >= set(self.sensors) - self.state.absent
                )
                assert there
                self.open, self.closed = 0, round_
                self.reply(round_, *self.sensors)
            case Train(round_):
                assert round_ == self.closed
                self.disk.learn(round_)
                self.events.append(Trained(self.progress, self.now))
            case Finish():
                assert self.disk.round == self.plan.rounds
                self.disk.commit()
                self.events.append(Saved(self.disk.disk))
            case RepeatOpening(sensor):
                assert self.open
                self.announce(self.open, sensor)
            case RepeatRound(sensor):
                assert self.closed
                self.announce(self.closed, sensor)
                self.reply(self.closed, sensor)
            case _:
                self.serve(effect)

    def serve(self, effect: Effect) -> None:
        match effect:
            case Admit(sensor, member):
                self.members[sensor] = member
            case Welcome(sensor, hello):
                self.sessions[sensor] = int(hello.session)
            case Reject():
                raise AssertionError("all have the same columns as ever")
            case Refuse(sensor, _, remedy):
                self.events.append(Excluded(sensor))
                # else it has gone already
                if self.sessions.pop(sensor) == self.sensors[sensor].session:
                    self.put_back_a_newer_copy(sensor, remedy)
            case SendEnd(sensor) if sensor in self.sessions:
                self.calls.append((sensor, Told("end", self.sessions[sensor])))

    def announce(self, round_: int, *sensors: str) -> None:
        self.down += [
            (name, Told("opening", attempt=self.attempt, round=round_)) for name in sensors
        ]

    def reply(self, round_: int, *sensors: str) -> None:
        self.down += [(name, Told("reply", attempt=self.attempt, round=round_)) for name in sensors]

    def put_back_a_newer_copy(self, sensor: str, remedy: str) -> None:
        """What the sensor's operator is told to do."""
        self.sensors[sensor].runs = False
        older = self.disk if "head's" in remedy else self.sensors[sensor]
        newest = max(older.copies, key=max)
        assert max(newest) > max(older.disk), "there is a newer one"
        older.disk = newest
        self.sensors[sensor].start()
        self.replaced = older is self.disk

    replaced = False  # the head's disk was, which it has to start again from

    # What arrives

    def hear(self, name: str, told: Told) -> None:
        """The head receives a sensor's message."""
        if self.state.ended:
            return
        match told.kind:
            case "hello":
                if told.session < self.sessions.get(name, 0):
                    return  # of an earlier process
                hello = VflHello(
                    session=f"{told.session:016}",
                    run="1" * 16,
                    software="",
                    identity=name * 16,
                    incarnation=1,
                    columns=1,
                    round=told.round,
                    kept=told.kept,
                )
                self.happens(Joined(name, hello, self.sessions.get(name) != told.session, self.now))
            case "will" if told.session == self.sessions.get(name):
                self.happens(Lost(name))
            case "done":
                self.happens(Finished(name))
            case "embeddings" if told.session == self.sessions.get(name) and self.open:
                self.take_part(name, told)
        if self.replaced:
            self.replaced = False
            self.start_head()

    def take_part(self, name: str, told: Told) -> None:
        assert (told.attempt, told.round) <= (self.attempt, self.open), (
            "an honest sensor would be refused"
        )
        if self.plan.waits:
            assert told.learnt == tuple(range(1, told.round)), (
                "it has learnt from every round before, once"
            )
        if told.attempt != self.attempt:
            return
        mine, news = self.parts[name], False
        if told.round == self.open and told.part not in mine:
            mine.add(told.part)
            news = True
        whole = news and len(mine) == PARTS
        prompt = whole or (told.round < self.open and told.part == PARTS - 1)
        self.happens(Embedded(name, news, whole, prompt, self.now))

    def send_down(self, name: str, told: Told) -> None:
        if self.sensors[name].runs:
            self.sensors[name].receive(told)

    # What can happen

    @rule(data=st.data(), again=st.booleans())
    @precondition(lambda self: self.down)
    def a_frame_reaches_a_sensor(self, data: st.DataObject, again: bool) -> None:
        """In any order, and perhaps not for the last time."""
        at = data.draw(st.integers(0, len(self.down) - 1))
        self.send_down(*(self.down[at] if again else self.down.pop(at)))

    @rule(data=st.data(), again=st.booleans())
    @precondition(lambda self: any(each.frames for each in self.sensors.values()))
    def a_frame_reaches_the_head(self, data: st.DataObject, again: bool) -> None:
        name = data.draw(
            st.sampled_from([name for name, each in self.sensors.items() if each.frames])
        )
        frames = self.sensors[name].frames
        at = data.draw(st.integers(0, len(frames) - 1))
        self.hear(name, frames[at] if again else frames.pop(at))

    @rule(data=st.data())
    @precondition(lambda self: self.down or any(each.frames for each in self.sensors.values()))
    def frames_are_lost(self, data: st.DataObject) -> None:
        self.down = data.draw(st.sampled_from((self.down, [])))
        for each in self.sensors.values():
            each.frames = data.draw(st.sampled_from((each.frames, [])))

    @rule(data=st.data())
    @precondition(lambda self: any(each.out for each in self.sensors.values()))
    def a_sensor_is_heard(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, each in self.sensors.items() if each.out]))
        self.hear(name, self.sensors[name].out.popleft())

    @rule()
    @precondition(lambda self: self.calls)
    def a_sensor_hears(self) -> None:
        self.send_down(*self.calls.pop(0))

    @rule(times=st.integers(1, 20))
    def all_goes_well_for_a_while(self, times: int) -> None:
        for _ in range(times):
            self.deliver_everything()

    @rule(seconds=st.sampled_from((0.1, 1.1, 3.0, 11.0, 40.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.happens(Tick(self.now))

    @rule(data=st.data())
    def a_sensor_starts_or_is_killed(self, data: st.DataObject) -> None:
        sensor = self.sensors[data.draw(st.sampled_from(self.plan.sensors))]
        if sensor.runs:
            sensor.die()
        else:
            sensor.start()

    @rule(data=st.data())
    @precondition(lambda self: any(not each.runs for each in self.sensors.values()))
    def a_sensor_starts_from_an_older_copy(self, data: st.DataObject) -> None:
        name = data.draw(
            st.sampled_from([name for name, each in self.sensors.items() if not each.runs])
        )
        self.sensors[name].disk = data.draw(st.sampled_from(self.sensors[name].copies))
        self.sensors[name].start()

    @rule(data=st.data(), older=st.booleans())
    def the_head_is_killed_and_starts_again(self, data: st.DataObject, older: bool) -> None:
        """One that has ended says that all is played, unless its disk is an older one."""
        if older:
            self.disk.disk = data.draw(st.sampled_from(self.disk.copies))
        if older or not self.state.ended:
            self.start_head()

    @rule(products=st.integers(1, 3))
    def products_come_later(self, products: int) -> None:
        self.products = min(self.products, self.disk.round + products)

    def deliver_everything(self) -> None:
        """What is under way, but not what that brings about."""
        down, self.down, calls, self.calls = self.down, [], self.calls, []
        for name, told in (*calls, *down):
            self.send_down(name, told)
        for name, sensor in self.sensors.items():
            up, sensor.frames, out, sensor.out = sensor.frames, [], sensor.out, deque()
            for told in (*out, *up):
                self.hear(name, told)

    # What is promised

    @invariant()
    def it_says_where_it_is(self) -> None:
        assert self.state.progress == self.progress
        assert (self.state.open.round if self.state.open else 0) == self.open
        assert (self.state.previous or 0) == self.closed
        assert self.state.gathering <= (self.open == 0)

    @invariant()
    def models_have_learnt_from_each_round_once(self) -> None:
        assert self.disk.learnt == tuple(range(1, self.disk.round + 1))
        for each in self.sensors.values():
            expected = tuple(range(1, each.round + 1))
            assert each.learnt == expected if self.plan.waits else set(each.learnt) <= set(expected)

    @invariant()
    def it_ends_with_the_last_round_only(self) -> None:
        assert self.state.is_over <= (self.disk.round == self.plan.rounds)
        assert self.state.ended <= self.state.is_over

    def teardown(self) -> None:
        """Once nothing fails any more, every run ends,
        and all who wait for each other have all of it.
        """
        if not hasattr(self, "plan"):
            return
        self.products = self.plan.rounds
        for _ in range(200):
            if self.state.ended:
                break
            self.now += 0.5
            for name, sensor in self.sensors.items():
                # the head says so
                if not sensor.runs and (not sensor.ended or name in self.state.awaited):
                    sensor.start()
            self.deliver_everything()
            self.happens(Tick(self.now))
        assert self.state.ended, self.state
        assert self.disk.disk[-1] == self.plan.rounds


Federation.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
test_a_federation_keeps_its_promises = Federation.TestCase
