"""State machine of a head: (state, event) -> (state, effects).

Pure: no MQTT, clock, files or tensors.

A head gathers its sensors and finds the round that all can go on from. Then it opens, closes and
trains on one round after another, until the last is on the disks of all. A sensor that has missed
something is sent it again; if that is gone, all gather anew. Times are seconds of any monotonic
clock.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from broker_config.protocol.errors import abbreviate
from broker_config.protocol.messages import Refusal, Stage
from edge.terminal.formatting import format_names
from edge_node.extensions.vfl.messages import VflHello
from trainer import progress
from trainer.federation.server.membership import WINDOW

_LONGEST = 30.0  # seconds between two times, at most
# times the patience, after which a sensor is late even though more and more of its rows come
_DRIPS = 10.0
_QUIET = 10.0  # seconds without products after which rounds count as paused
# times that a sensor is sent what it lacks of a round; each time it may answer, and as often
# unasked
REPEATS = 8


class PartyProgress(NamedTuple):
    """Training progress of a party."""

    round: int  # the last one that its model has learnt from
    kept: tuple[int, ...]  # rounds whose end it can go back to


def find_common_round(head: PartyProgress, sensors: Mapping[str, PartyProgress]) -> int | None:
    """The newest round that all are at the end of, or can all go back to; None if there is none."""
    everybody = [head, *sensors.values()]
    if all(each.round == head.round for each in everybody):
        return head.round
    return max(set[int].intersection(*(set(each.kept) for each in everybody)), default=None)


class Member(msgspec.Struct, frozen=True):
    """A sensor that was admitted."""

    identity: str
    columns: int


class Timing(NamedTuple):
    """Seconds that a head waits, beside the spec's patience."""

    again: float = 1.0  # for an answer, after which sensors are asked again, then twice as many
    linger: float = 30.0  # for sensors to write down the last round


TIMING = Timing()


class Plan(NamedTuple):
    """Settings that are fixed before the first round."""

    sensors: tuple[str, ...]
    rounds: int = 0  # 0: for ever
    waits: bool = True  # for sensors that are absent
    patience: float = 1.0  # seconds
    timing: Timing = TIMING


class Collection(NamedTuple):
    """The open round: whose parts have come, and when."""

    round: int
    opened: float
    asked: float  # when the sensors were asked last
    silence: float  # seconds without an answer after which they are asked again
    heard: Mapping[str, float] = {}  # when something new of a sensor's part came last
    whole: frozenset[str] = frozenset()  # sensors whose part is


class HeadState(NamedTuple):
    """The state."""

    plan: Plan
    since: float  # when gathering began, or a round last closed
    finished: float  # when the last round closed
    members: Mapping[str, Member] = {}
    present: frozenset[str] = frozenset()  # sensors that are connected, as far as is known
    progress: PartyProgress = PartyProgress(0, (0,))  # the head's own
    gathering: bool = True
    # of the sensors that have answered since gathering began
    answers: Mapping[str, PartyProgress] = {}
    open: Collection | None = None
    previous: int | None = None  # the closed round that can be sent again
    absent: frozenset[str] = frozenset()  # sensors that rounds no longer wait for
    paused: bool = False
    lacks: Mapping[str, str] = {}  # what each sensor waits for, in words
    awaited: str = ""  # what was last reported to be waited for
    repeats: Mapping[str, int] = {}  # times that sensors were sent again what they lack
    counted: float = 0.0  # since when these are
    done: frozenset[str] = frozenset()  # sensors that have written down the last round
    # the last round is on the disks of all that can be expected to write it there
    ended: bool = False

    @property
    def round(self) -> int:
        """The last one that is closed."""
        return self.progress.round

    @property
    def is_over(self) -> bool:
        """Whether the last round is closed."""
        return 0 < self.plan.rounds <= self.round

    @property
    def stage(self) -> Stage:
        """In the words of messages."""
        if self.is_over:
            return "finished"
        if self.gathering:
            return "gathering"
        return "open"

    @property
    def awaits_products(self) -> bool:
        """Whether the next round cannot open yet."""
        return self.open is None and not self.gathering and not self.is_over

    def missing(self) -> list[str]:
        """Sensors that the open round, or gathering, still waits for."""
        there = self.open.whole if self.open else self.answers
        return [name for name in self.plan.sensors if name not in there]

    def describe_wait(self) -> str:
        """What rounds wait for while they are paused, in words."""
        return (
            "more products with a label" if self.awaits_products else format_names(self.missing())
        )


class Started(NamedTuple):
    """The head is connected, and its model is as far as it is on the disk."""

    progress: PartyProgress
    now: float


class Loaded(NamedTuple):
    """The model is loaded."""

    progress: PartyProgress
    now: float


class Joined(NamedTuple):
    """A sensor that may take part says how far it is."""

    sensor: str
    hello: VflHello
    new: bool  # another process than the one that spoke for it before
    now: float


class Lost(NamedTuple):
    """A sensor's connection has ended."""

    sensor: str


class Excluded(NamedTuple):
    """A sensor was refused."""

    sensor: str


class Finished(NamedTuple):
    """A sensor has written down the last round."""

    sensor: str


class Opened(NamedTuple):
    """A round is announced."""

    round: int
    now: float


class Lacking(NamedTuple):
    """The next round's products are not in this file yet."""

    path: str
    grown: float  # when it last had news
    now: float


class Embedded(NamedTuple):
    """Embeddings of this attempt have come."""

    sensor: str
    news: bool  # some that had not come before, of the open round
    whole: bool  # the last ones of its part of the open round
    prompt: bool  # the end of its part of any round, within the patience
    now: float


class Trained(NamedTuple):
    """The head has learnt from a closed round."""

    progress: PartyProgress
    now: float


class Saved(NamedTuple):
    """The last round is on the head's disk."""

    kept: tuple[int, ...]


class Tick(NamedTuple):
    """Time passes."""

    now: float


Event = (
    Started
    | Loaded
    | Joined
    | Lost
    | Excluded
    | Finished
    | Opened
    | Lacking
    | Embedded
    | Trained
    | Saved
    | Tick
)


class Gather(NamedTuple):
    """Forget the rounds of this attempt, and ask every sensor how far it is."""


class Load(NamedTuple):
    """Load the model for the columns that there are now; answered by Loaded."""


class Restore(NamedTuple):
    """Let the model go back to the end of a round."""

    round: int


class Begin(NamedTuple):
    """Begin a new attempt."""


class Open(NamedTuple):
    """Announce a round, if its products are there; answered by Opened or Lacking."""

    round: int


class Close(NamedTuple):
    """Send what a round trains with."""

    round: int


class Train(NamedTuple):
    """Let the model learn from the closed round; answered by Trained."""

    round: int


class Finish(NamedTuple):
    """Write down and deploy the last round, and publish the end; answered by Saved."""


class RepeatOpening(NamedTuple):
    """Announce the open round again, to this sensor alone."""

    sensor: str


class RepeatRound(NamedTuple):
    """Send a sensor the whole of the closed round again."""

    sensor: str


class Admit(NamedTuple):
    """Write down a member."""

    sensor: str
    member: Member


class Welcome(NamedTuple):
    """Let the sender of a VflHello speak for its sensor."""

    sensor: str
    hello: VflHello


class Reject(NamedTuple):
    """Do not let a sensor in."""

    sensor: str
    refusal: Refusal


class Refuse(NamedTuple):
    """Exclude a sensor, and say why."""

    sensor: str
    reason: str
    remedy: str


class SendEnd(NamedTuple):
    """Tell a sensor that the last round is closed."""

    sensor: str


class Report(NamedTuple):
    """Report an event: if there is a key, for the first time only."""

    event: progress.AnyEvent
    key: tuple[object, ...] = ()


RoundEffect = Gather | Load | Restore | Begin | Open | Close | Train | Finish
SensorEffect = RepeatOpening | RepeatRound | Admit | Welcome | Reject | Refuse | SendEnd
Effect = RoundEffect | SensorEffect | Report
Step = tuple[HeadState, tuple[Effect, ...]]


def advance(state: HeadState, event: Event) -> Step:
    """The next state and what has to be done, in order."""
    match event:
        case Tick(now):
            return _tick(state, now)
        case Embedded():
            return _take_embeddings(state, event)
        case Opened(round_, now):
            return state._replace(open=Collection(round_, now, now, state.plan.timing.again)), ()
        case Trained(own, now):
            state = state._replace(progress=own, paused=False)
            return _next(state, now) if state.is_over else (state, ())
        case Lacking():
            return _lack_products(state, event)
        case Joined():
            return _join(state, event)
        case Lost(sensor):
            lost = progress.NodeLost(node=sensor, round=state.round)
            is_news = sensor in state.present and not state.is_over
            report = (Report(lost),) if is_news else ()
            return state._replace(present=state.present - {sensor}), report
        case Excluded(sensor):
            return state._replace(present=state.present - {sensor}), ()
        case Finished(sensor):
            marked = state._replace(done=state.done | {sensor}) if state.is_over else state
            return marked, ()
        case Saved(kept):
            return state._replace(progress=PartyProgress(state.round, kept)), ()
        case Started(own, now):
            return _gather(state._replace(progress=own), now)
        case Loaded(own, now):
            return _go_on(state._replace(progress=own), now)


def _note(text: str, *key: object) -> Report:
    return Report(progress.Note(text=text), key)


def _report_waiting(state: HeadState, text: str) -> Step:
    """Report what is waited for, unless that was reported last."""
    return (state, ()) if text == state.awaited else (state._replace(awaited=text), (_note(text),))


# The round to go on from


def _gather(state: HeadState, now: float) -> Step:
    """Ask every sensor how far it is; when all have answered, rounds go on from where all can."""
    state = state._replace(
        gathering=True, since=now, answers={}, open=None, previous=None, done=frozenset()
    )
    return state, (Gather(),)


def _try_to_go_on(state: HeadState, now: float) -> Step:
    """Go on if it is known from which round."""
    plan = state.plan
    if state.missing():
        late = now - state.since > plan.patience
        # since each sensor has named its columns
        sizes_known = state.members.keys() >= set(plan.sensors)
        if plan.waits or not late or not state.answers or not sizes_known:
            return state, ()
    # until the first round is closed, a sensor may still come with other columns
    if not state.round:
        return state, (Load(),)
    return _go_on(state, now)


def _go_on(state: HeadState, now: float) -> Step:
    own = state.progress
    target = state.round
    effects = list[Effect]()
    if state.plan.waits:
        common = find_common_round(own, state.answers)
        if common is None:
            return _refuse_stragglers(state)
        target = common
    if target != own.round:
        text = f"going back from round {own.round} to round {target}, which all have on their disks"
        effects = [_note(text), Restore(target)]
    kept = tuple(each for each in own.kept if each <= target)
    absent = frozenset(state.missing())
    state = state._replace(progress=PartyProgress(target, kept), gathering=False, absent=absent)
    state, first = _next(state, now)
    return state, (*effects, Begin(), *first)


def _refuse_stragglers(state: HeadState) -> Step:
    """Refuse those that share no round with the head,
    or none with it and with those that share newer ones.
    """
    own = state.progress
    effects = list[Effect]()
    answers = dict(state.answers)
    common = set(own.kept)
    newest = {
        name: max(common.intersection(each.kept), default=-1) for name, each in answers.items()
    }
    for name in sorted(answers, key=lambda name: -newest[name]):
        theirs = answers[name]
        if common.intersection(theirs.kept):
            common.intersection_update(theirs.kept)
            continue
        del answers[name]
        older = "head's" if min(theirs.kept, default=0) > own.round else "sensor's"
        reason = f"it can go back to rounds {theirs.kept}, the head to {own.kept}"
        remedy = (
            f"put the newer of the {older} --state folder back, or begin anew: edge-node vfl "
            "coordinate --new"
        )
        effects.append(Refuse(name, reason, remedy))
    return state._replace(answers=answers), tuple(effects)


# Rounds


def _next(state: HeadState, now: float) -> Step:
    """Open the next round; after the last one, publish the end."""
    return (
        (state._replace(finished=now), (Finish(),))
        if state.is_over
        else (state, (Open(state.round + 1),))
    )


def _lack_products(state: HeadState, event: Lacking) -> Step:
    """In a plant products come one by one: only where none comes for longer that is worth a
    word.
    """
    if event.now - max(state.since, event.grown) <= _QUIET:
        return state._replace(paused=False), ()
    return _report_waiting(
        state._replace(paused=True), f"waiting for more products in {event.path}"
    )


def _take_embeddings(state: HeadState, event: Embedded) -> Step:
    sensor = event.sensor
    collected = state.open
    # so fast that it is worth waiting for, even if its round is over
    if event.prompt and sensor in state.absent:
        state = state._replace(absent=state.absent - {sensor})
    if collected is None or not event.news:
        return state, ()
    collected = collected._replace(heard={**collected.heard, sensor: event.now})
    if not event.whole:
        return state._replace(open=collected), ()
    state = state._replace(open=collected._replace(whole=collected.whole | {sensor}))
    if state.lacks.get(sensor):
        state = state._replace(lacks={**state.lacks, sensor: ""})
    return _close(state, collected.round, event.now) if _is_complete(state) else (state, ())


def _is_complete(state: HeadState) -> bool:
    """Whether the open round has all parts that it waits for, and one at least."""
    whole = state.open.whole if state.open else frozenset()
    expected = state.plan.sensors if state.plan.waits else set(state.plan.sensors) - state.absent
    return bool(whole) and whole.issuperset(expected)


def _close(state: HeadState, round_: int, now: float) -> Step:
    """Send what the round trains with, open the next one, and train while the sensors do."""
    state = state._replace(open=None, previous=round_, since=now, repeats={}, counted=now)
    first = () if round_ == state.plan.rounds else (Open(round_ + 1),)
    return state, (Close(round_), *first, Train(round_))


# Timers


def _tick(state: HeadState, now: float) -> Step:
    if state.open is not None:
        return _check_round(state, state.open, now)
    effects: tuple[Effect, ...] = ()
    if state.gathering:
        if state.answers:
            state, effects = _try_to_go_on(state, now)
        if now - state.since > state.plan.patience and state.members:
            state, told = _report_absence(state)
            effects = (*effects, *told)
    elif not state.is_over:
        return _next(state, now)
    return state._replace(ended=_has_ended(state, now)), effects


def _check_round(state: HeadState, collected: Collection, now: float) -> Step:
    patience = state.plan.patience
    missing = state.missing()
    drips = now - collected.opened > _DRIPS * patience
    late = [
        each
        for each in missing
        if drips or now - collected.heard.get(each, collected.opened) > patience
    ]
    if late and state.plan.waits:
        state, effects = _pause(state, collected.round, late)
    else:
        state = state._replace(absent=state.absent | set(late)) if late else state
        effects = ()
        if late and _is_complete(state):
            return _close(state, collected.round, now)
    if missing and now - max([collected.asked, *collected.heard.values()]) > collected.silence:
        silence = min(_LONGEST, 2 * collected.silence)
        state = state._replace(open=collected._replace(asked=now, silence=silence))
        effects = (*effects, *map(RepeatOpening, missing))
    return state, effects


def _report_absence(state: HeadState) -> Step:
    """Gathering takes long."""
    missing = state.missing()
    round_ = state.round
    if not state.is_over:
        return _pause(state, round_ + 1, missing)
    if not state.answers:
        return state, ()
    behind = ", ".join(sorted(name for name, each in state.answers.items() if each.round < round_))
    gone = ", ".join(missing)
    return _report_waiting(
        state,
        f"{behind} came back without round {round_}, and {gone} has ended: start {gone} again, "
        "and the last rounds are played once more",
    )


def _pause(state: HeadState, round_: int, waiting_for: list[str]) -> Step:
    return _report_waiting(
        state._replace(paused=True), f"round {round_} waits for {', '.join(waiting_for)}"
    )


def _has_ended(state: HeadState, now: float) -> bool:
    """Whether the last round is closed and on the disks of all sensors that can be expected to
    write it there.
    """
    if not state.is_over or (state.gathering and state.present):
        return False
    return (
        state.done >= set(state.plan.sensors) - state.absent
        or now - state.finished > state.plan.timing.linger
    )


# Sensors that come, for the first time or again


def _join(state: HeadState, event: Joined) -> Step:
    sensor, hello, new, now = event
    known = state.members.get(sensor)
    member = Member(hello.identity, hello.columns)
    if known and known.columns != member.columns and state.round:
        reason = f"{sensor} had {known.columns} columns, and now has {member.columns}"
        remedy = "pass the same --columns as before, or begin anew: edge-node vfl coordinate --new"
        return state, (
            Reject(sensor, Refusal(session=hello.session, reason=reason, remedy=remedy)),
        )
    effects = list[Effect]()
    if known != member:
        effects.append(Admit(sensor, member))
    if sensor not in state.present:
        effects.append(Report(progress.NodeJoined(node=sensor)))
    if hello.lacks and hello.lacks != state.lacks.get(sensor):
        text = f"the round waits for {sensor}, which lacks {abbreviate(hello.lacks, 300)}"
        effects.append(_note(text, "lacks", sensor, now // WINDOW))
    absent = state.absent - {sensor} if new else state.absent
    state = state._replace(
        members={**state.members, sensor: member},
        present=state.present | {sensor},
        absent=absent,
        lacks={**state.lacks, sensor: hello.lacks},
    )
    theirs = PartyProgress(hello.round, hello.kept)
    state, sent = _catch_up(state, sensor, theirs, now)
    effects += [Welcome(sensor, hello), *sent]
    if state.is_over and (theirs.round == state.round or not state.plan.waits):
        effects.append(SendEnd(sensor))  # to it alone: a retained end could be replayed later
    return state, tuple(effects)


def _catch_up(state: HeadState, sensor: str, theirs: PartyProgress, now: float) -> Step:
    """Bring a sensor to the open round, or go back with all to where it is."""
    if state.gathering:
        return _try_to_go_on(state._replace(answers={**state.answers, sensor: theirs}), now)
    if now - state.counted > WINDOW:  # a round that stays open for long counts as a new one
        state = state._replace(repeats={}, counted=now)
    count = state.repeats.get(sensor, 0)
    if count == REPEATS:
        return state, (
            _note(
                f"{sensor} asks for the same round again and again: it has to wait",
                "repeats",
                sensor,
            ),
        )
    state = state._replace(repeats={**state.repeats, sensor: count + 1})
    behind = state.round - theirs.round
    effects = list[Effect]()
    if behind == 1 and state.previous == state.round:
        effects.append(RepeatRound(sensor))
    elif behind and state.plan.waits:
        return _gather(state, now)
    if state.open:
        effects.append(RepeatOpening(sensor))
    return state, tuple(effects)
