"""State machine of a sensor's session: (state, event) -> (state, effects).

Pure: no MQTT, clock, files or models.
"""

from collections.abc import Sequence, Set
from math import inf
from typing import NamedTuple

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Finished, Message, Presence, RoundState, Welcome
from edge_node.extensions.vfl.client.target_round import (
    MissingRows,
    TargetRound,
    is_newer,
    is_skipped,
)
from edge_node.extensions.vfl.frames import Graded, Opened, Represented
from edge_node.extensions.vfl.messages import VflSpec
from trainer import progress

HEAD_WAIT = 10.0  # seconds for a head that asks for more rounds
_CALM = 0.2  # seconds between two VflHello
_PROGRESS = 1.0  # seconds between two reports of progress: rounds may be many


class NewRunError(EdgeNodeError):
    """The head has begun another run, and this process has not learnt anything in the one that
    it was in.
    """

    def __init__(self, run: str):
        super().__init__("the head has started a new run", "run edge-node vfl join again")
        self.run = run


class Session(NamedTuple):
    """The state. Times are seconds of any monotonic clock."""

    spec: VflSpec
    name: str  # of the sensor
    session: str  # id of this process
    began: float
    round: int  # the last one that the model has learnt from
    reported: tuple[float, int]  # when progress was, and the round then
    lacking: MissingRows
    head_wait: float  # seconds since it began, for a head that asks for more rounds
    attempt: int = -1
    target: TargetRound | None = None  # what it works on
    described: Set[str] = frozenset()  # late products that the head was told of
    lacks: str = ""  # what the target waits for, in words
    call: bool = False  # whether the head is to be told how far we are
    called: float = -inf  # when it last was
    welcomed: bool = False
    alone: bool = False  # the head was said to be away
    played: int = 0  # the last round of all, as retained
    ignored: frozenset[str] = frozenset()  # topics of which it was said
    over: bool = False  # the run has ended
    other_run: str = ""  # of which the head has told, and which may be an older one

    @property
    def takes_other_run(self) -> bool:
        """Whether a refusal means that it is to take part in the run that it was told of.

        A process that a head has let in ends instead, so that its owner knows. One that begins
        with a run that is over was started for the next.
        """
        return self.other_run != "" and not self.welcomed

    @property
    def is_polling(self) -> bool:
        """Whether it waits for what no message brings: rows, or the time for a VflHello."""
        return self.call or (self.target is not None and not self.target.sent)


def start(
    spec: VflSpec, name: str, session: str, round_: int, now: float, head_wait: float = HEAD_WAIT
) -> Session:
    """The state of a process that begins, with a model that has learnt from `round_` last."""
    return Session(
        spec, name, session, now, round_, (now, round_), MissingRows(spec.patience / 2), head_wait
    )


# Events


class Online(NamedTuple):
    """The broker can be reached, for the first time or again."""


class Told(NamedTuple):
    """A message has arrived."""

    message: Message


class RoundOpened(NamedTuple):
    """A round of this run opens, which asks nothing impossible (`check_frame`)."""

    frame: Opened
    now: float


class Replied(NamedTuple):
    """The head has sent a part of what a round of this run trains with."""

    frame: Represented | Graded
    now: float


class Unusable(NamedTuple):
    """What arrived on a topic cannot be meant."""

    topic: str
    error: str


class Idle(NamedTuple):
    """Nothing more has arrived."""

    now: float


class Rewound(NamedTuple):
    """Answer to Rewind: the model is at the end of `round`."""

    frame: Opened
    round: int
    now: float


class CannotRewind(NamedTuple):
    """Answer to Rewind: the disk does not have that round."""


class ProductsUnknown(NamedTuple):
    """Answer to ReadRows: the opening that named some of the products was lost."""


class RowsRead(NamedTuple):
    """Answer to ReadRows: the target's products, and those of them that have no sample yet."""

    products: Sequence[str]
    late: frozenset[str]
    reply: Represented | Graded | None
    now: float


class Described(NamedTuple):
    """Answer to DescribeMissing."""

    text: str


class Learnt(NamedTuple):
    """Answer to Learn: the head's reply is whole, and the model has learnt from it."""

    now: float


Answer = RowsRead | ProductsUnknown | Learnt | Rewound | CannotRewind | Described
Event = RoundOpened | Replied | Idle | Told | Online | Unusable | Answer


# Effects


class KeepProducts(NamedTuple):
    """Remember the names of the products that an opening brings."""

    frame: Opened


class Rewind(NamedTuple):
    """Go back to where this round begins, and void what is on the disk after that.

    Answered by Rewound or CannotRewind.
    """

    frame: Opened


class SkipTo(NamedTuple):
    """The model counts as of this round, whatever it has learnt from."""

    round: int


class ReadRows(NamedTuple):
    """Look for the samples of a round; answered by RowsRead or ProductsUnknown.

    `late` are those that were not there before; `reply` is what the head has sent already.
    """

    frame: Opened
    late: frozenset[str]
    reply: Represented | Graded | None = None


class DescribeMissing(NamedTuple):
    """Find words for products that have no sample; answered by Described."""

    products: Sequence[str]


class Embed(NamedTuple):
    """Embed these products, with the samples that there are, for a round known of `since` then."""

    frame: Opened
    products: Sequence[str]
    since: float


class Send(NamedTuple):
    """Send the embeddings, for the first time or again."""


class Learn(NamedTuple):
    """Take in a part of the head's reply, and learn from it once it is whole;
    then answered by Learnt.
    """

    frame: Represented | Graded


class FinishRound(NamedTuple):
    """A round is over: commit at the end of a group."""

    round: int


class SayHello(NamedTuple):
    """Tell the head how far we are."""

    round: int
    lacks: str


class Report(NamedTuple):
    """Tell the user."""

    event: progress.AnyEvent


class Fail(NamedTuple):
    """End with an error."""

    error: EdgeNodeError


Question = ReadRows | Learn | Rewind | DescribeMissing  # what is answered with an event at once
Effect = Embed | Send | FinishRound | KeepProducts | SayHello | Report | SkipTo | Fail | Question
Step = tuple[Session, tuple[Effect, ...]]


def advance(state: Session, event: Event) -> Step:
    """The next state and what has to be done, in order."""
    if state.over:
        return state, ()
    match event:
        case RoundOpened(frame, now):
            return _open_round(state, frame, now)
        case Replied(reply, now):
            return _receive_reply(state, reply, now)
        case Idle(now):
            return _continue(state, now)
        case Told(message):
            return _receive_message(state, message)
        case Online():
            return state._replace(call=True), ()
        case Unusable(topic, error):
            return _ignore(state, topic, error)
        case _:
            return _receive_answer(state, event)


def _receive_answer(state: Session, answer: Answer) -> Step:
    match answer:
        case RowsRead() if state.target:
            return _embed(state, state.target, answer)
        case Learnt(now) if state.target:
            return _finish_round(state, state.target.frame.round, now)
        case ProductsUnknown():
            return state._replace(target=None, call=True), ()
        case Rewound(frame, round_, now):
            return _set_target(state._replace(attempt=frame.attempt, round=round_), frame, now)
        case CannotRewind():
            return state._replace(call=True), ()
        case Described(text):
            note = _note(f"{state.name} lacks {text}; the round waits for it")
            return state._replace(lacks=text, call=True), (note,)
    return state, ()


# Messages


def _receive_message(state: Session, message: Message) -> Step:
    match message:
        case Welcome(session=session) if session == state.session:
            back = (
                (_note(f"the head is back; the next round is {state.round + 1}"),)
                if state.alone
                else ()
            )
            return state._replace(welcomed=True, alone=False), back
        case VflSpec(run=run) if run != state.spec.run:
            return _receive_other_run(state, message)
        case Presence(online=True):
            return state._replace(call=True), ()
        case Presence():
            return state._replace(alone=True), (_note("the head is not connected; waiting for it"),)
        case RoundState(status="finished", run=run, round=round_) if run == state.spec.run:
            # it may be an old one: the head is to say so to us
            return state._replace(played=round_, call=True), ()
        case Finished(session=session) if session == state.session:
            return state._replace(over=True), ()
    return state, ()


def _receive_other_run(state: Session, spec: VflSpec) -> Step:
    """A head that has begun another run refuses us; if it is older, it has only been said again."""
    if not state.round:
        return state, (Fail(NewRunError(spec.run)),)
    if state.name not in spec.sensors:
        return state, (
            Fail(EdgeNodeError("the head has started a new run", "run edge-node vfl join again")),
        )
    return state._replace(call=True, other_run=spec.run), ()


def _ignore(state: Session, topic: str, error: str) -> Step:
    if state.target and state.target.sent:
        state = state._replace(call=True)  # it may have been the answer
    if topic in state.ignored:
        return state, ()
    note = _note(f"ignored a message on {topic}, and will others like it: {error}")
    return state._replace(ignored=state.ignored | {topic}), (note,)


# Rounds


def _open_round(state: Session, frame: Opened, now: float) -> Step:
    if not is_newer(frame, state.attempt, state.round):
        return state, ()
    keep = KeepProducts(frame)
    if frame.part < frame.parts - 1:
        return state, (keep,)
    if frame.attempt > state.attempt:
        return state._replace(target=None), (keep, Rewind(frame))
    state, effects = _set_target(state, frame, now)
    return state, (keep, *effects)


def _set_target(state: Session, frame: Opened, now: float) -> Step:
    """Work on a round that has opened, if the model is where that begins."""
    target = state.target
    effects = tuple[Effect, ...]()
    if frame.round != state.round + 1:
        if state.spec.absent == "wait":
            return state._replace(call=True), ()  # what the head has sent in between was lost
        state = state._replace(round=frame.round - 1)
        target = None
        effects = (SkipTo(frame.round - 1),)
    if target is None or target.frame.round != frame.round:
        return state._replace(target=TargetRound(frame, now)), effects
    if target.sent:
        return state, (Send(),)  # we are asked again: something was lost
    return state._replace(target=target._replace(frame=frame)), ()  # it waits since then


def _receive_reply(state: Session, frame: Represented | Graded, now: float) -> Step:
    target = state.target
    if target is None or (frame.attempt, frame.round) != (state.attempt, target.frame.round):
        return state, ()
    if target.sent:
        return state, (Learn(frame),)
    if state.spec.absent != "wait" and is_skipped(frame, state.spec.sensors.index(state.name)):
        return _finish_round(state, frame.round, now)
    # the round is over at the head, and brought after us
    return state, (ReadRows(target.frame, target.late, frame),)


def _embed(state: Session, target: TargetRound, read: RowsRead) -> Step:
    """Embed the target's samples, once they are there or cannot be waited for any longer."""
    late = read.late
    waited = read.now - target.since
    effects = tuple[Effect, ...]()
    waits = bool(late)
    if state.spec.absent != "wait":
        lacking, waits = state.lacking.check(read.products, late, waited, read.now)
        state = state._replace(lacking=lacking)
    elif late - state.described and waited > state.spec.patience:
        state = state._replace(described=late)
        effects = (DescribeMissing([each for each in read.products if each in late]),)
    if waits:
        return state._replace(target=target._replace(late=late)), effects
    learn = () if read.reply is None else (Learn(read.reply),)
    state = state._replace(target=target._replace(sent=True), lacks="")
    return state, (Embed(target.frame, read.products, target.since), Send(), *learn)


def _finish_round(state: Session, round_: int, now: float) -> Step:
    state = state._replace(round=round_, target=None, call=state.call or round_ == state.played)
    since, before = state.reported
    if now - since < _PROGRESS:
        return state, (FinishRound(round_),)
    rate = max(0.0, (round_ - before) / (now - since))
    learning = Report(progress.Learning(node=state.name, round=round_, rate=rate))
    return state._replace(reported=(now, round_)), (FinishRound(round_), learning)


def _continue(state: Session, now: float) -> Step:
    """Do what is to be done next."""
    if _is_left_alone(state, now):
        return state._replace(over=True), (_note(f"all {state.played} rounds are played"),)
    hello: tuple[Effect, ...] = ()
    if state.call and now - state.called > _CALM:
        hello = (SayHello(state.round, state.lacks),)
        state = state._replace(call=False, called=now)
    if state.target and not state.target.sent:
        return state, (*hello, ReadRows(state.target.frame, state.target.late))
    return state, hello


def _is_left_alone(state: Session, now: float) -> bool:
    """Whether, after the last round, no head has come in time to ask for more."""
    over = state.alone and not state.welcomed and 0 < state.played <= state.round
    return over and now - state.began > state.head_wait


def _note(text: str) -> Report:
    return Report(progress.Note(text=text))
