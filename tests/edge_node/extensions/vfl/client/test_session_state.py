"""A sensor's state machine, without broker, clock or model: it has learnt from round 4,
and round 5 is next.
"""

from typing import Any

import msgspec
import pytest

from broker_config.protocol.messages import Finished, Message, Presence, RoundState, Welcome
from edge_node.extensions.vfl.client.session_state import (
    CannotRewind,
    Described,
    DescribeMissing,
    Effect,
    Embed,
    Event,
    Fail,
    FinishRound,
    Idle,
    KeepProducts,
    Learn,
    Learnt,
    NewRunError,
    Online,
    ProductsUnknown,
    ReadRows,
    Replied,
    Report,
    Rewind,
    Rewound,
    RoundOpened,
    RowsRead,
    SayHello,
    Send,
    Session,
    SkipTo,
    Told,
    Unusable,
    advance,
    start,
)
from edge_node.extensions.vfl.client.target_round import TargetRound
from edge_node.extensions.vfl.frames import Graded, Opened, Represented
from edge_node.extensions.vfl.messages import VflSpec, Window
from trainer import progress

RUN, OURS, OTHERS = "0" * 16, "a" * 16, "b" * 16
SPEC = VflSpec(
    federation="plant",
    run=RUN,
    software="",
    sensors=("press", "oven"),
    network="dense",
    classes=("good", "bad"),
    window=Window(start=2, chunk=2),
    patience=10.0,
)
OTHER_RUN = msgspec.structs.replace(SPEC, run="1" * 16)


def opened(round_: int, attempt: int = 1, part: int = 0, parts: int = 1) -> Opened:
    first, last = SPEC.window.span(round_)
    return Opened(
        run=RUN,
        attempt=attempt,
        round=round_,
        first=first,
        last=last,
        since=first,
        products=(),
        part=part,
        parts=parts,
    )


def represented(round_: int, attempt: int = 1, iterations: tuple[int, ...] = (2, 2)) -> Represented:
    return Represented(
        run=RUN,
        attempt=attempt,
        round=round_,
        row=0,
        embeddings=(),
        labels=b"",
        iterations=iterations,
    )


def graded(round_: int, iterations: int = 2) -> Graded:
    return Graded(
        run=RUN, attempt=1, round=round_, row=0, gradient=b"", curvature=0.5, iterations=iterations
    )


def note(text: str) -> Report:
    return Report(progress.Note(text=text))


FIVE, SIX, SEVEN, BACK = opened(5), opened(6), opened(7), opened(3, attempt=2)
AGAIN, PART, LAST_PART = (
    opened(5, attempt=2),
    opened(5, part=0, parts=2),
    opened(5, part=1, parts=2),
)
REPLY, WITHOUT_US, WITHOUT_OTHER = (
    represented(5, iterations=each) for each in ((2, 2), (2, 0), (0, 2))
)
P, Q, NONE = ("p", "q"), frozenset("q"), frozenset[str]()  # the products, a late one, none
READ, EMBED, HELLO = ReadRows(FIVE, NONE), [Embed(FIVE, P, 100.0), Send()], SayHello(4, "")
IGNORED = "ignored a message on {}, and will others like it: why"
AWAY, HERE = (Presence(session=OTHERS, online=each) for each in (False, True))
END = RoundState(run=RUN, round=4, status="finished")
WAITS = start(SPEC, "oven", OURS, 4, now=100.0)._replace(attempt=1)
GOES_ON = start(msgspec.structs.replace(SPEC, absent="last"), "oven", OURS, 4, now=100.0)._replace(
    attempt=1
)


def working(state: Session = WAITS, **fields: Any) -> Session:
    """Round 5 has opened, at 100 s."""
    return state._replace(target=TargetRound(FIVE, 100.0, **fields))


def answering(state: Session = WAITS) -> Session:
    """Its embeddings are sent."""
    return working(state, sent=True)


def play(state: Session, *events: Event) -> tuple[Session, list[Effect]]:
    effects: list[Effect] = []
    for event in events:
        state, new = advance(state, event)
        effects += new
    return state, effects


def told(message: Message, at: float = 200.0) -> list[Event]:
    return [Told(message), Idle(at)]


Row = tuple[str, Session, list[Event], list[Effect]]
OPENINGS: list[Row] = [
    ("the next round", WAITS, [RoundOpened(FIVE, 100.0), Idle(100.0)], [KeepProducts(FIVE), READ]),
    ("a round that is learnt from", WAITS, [RoundOpened(opened(4), 100.0), Idle(100.0)], []),
    (
        "a round of an attempt that is over",
        WAITS,
        [RoundOpened(opened(5, attempt=0), 100.0), Idle(100.0)],
        [],
    ),
    (
        "a part of an opening: it brings products",
        WAITS,
        [RoundOpened(PART, 100.0), Idle(100.0)],
        [KeepProducts(PART)],
    ),
    (
        "the last part: the round",
        WAITS,
        [RoundOpened(LAST_PART, 100.0), Idle(100.0)],
        [KeepProducts(LAST_PART), ReadRows(LAST_PART, NONE)],
    ),
    (
        "a round whose embeddings are sent: they were lost",
        answering(),
        [RoundOpened(FIVE, 101.0)],
        [KeepProducts(FIVE), Send()],
    ),
    (
        "a new attempt begins where its round does",
        answering(),
        [RoundOpened(BACK, 101.0), Idle(101.0)],
        [KeepProducts(BACK), Rewind(BACK)],
    ),
    (
        "also if its round is this one",
        answering(),
        [RoundOpened(AGAIN, 101.0), Rewound(AGAIN, 4, 101.0), Idle(101.0)],
        [KeepProducts(AGAIN), Rewind(AGAIN), ReadRows(AGAIN, NONE)],
    ),
    (
        "the model has gone back",
        WAITS,
        [Rewound(BACK, 2, 101.0), Idle(101.0)],
        [ReadRows(BACK, NONE)],
    ),
    (
        "it went back once",
        WAITS,
        [Rewound(BACK, 2, 101.0), RoundOpened(BACK, 102.0)],
        [KeepProducts(BACK)],
    ),
    ("it cannot: the head is told how far it is", WAITS, [CannotRewind(), Idle(101.0)], [HELLO]),
    (
        "it cannot, and need not: it takes part as it is",
        GOES_ON,
        [Rewound(BACK, 4, 101.0), Idle(101.0)],
        [SkipTo(2), ReadRows(BACK, NONE)],
    ),
    (
        "what was lost in between is asked for",
        working(),
        [RoundOpened(SIX, 101.0), Idle(101.0)],
        [KeepProducts(SIX), HELLO, READ],
    ),
    (
        "or left out, where rounds need not wait",
        answering(GOES_ON),
        [RoundOpened(SEVEN, 101.0), Idle(101.0)],
        [KeepProducts(SEVEN), SkipTo(6), ReadRows(SEVEN, NONE)],
    ),
]
SAMPLES: list[Row] = [
    ("all are there", working(), [RowsRead(P, NONE, None, 100.0)], EMBED),
    (
        "one is late: it is waited for",
        working(),
        [RowsRead(P, Q, None, 109.0), Idle(109.1)],
        [ReadRows(FIVE, Q)],
    ),
    (
        "that takes long: it is said which",
        working(),
        [RowsRead(P, Q, None, 110.1)],
        [DescribeMissing(["q"])],
    ),
    ("it was said", working(WAITS._replace(described=Q)), [RowsRead(P, Q, None, 110.1)], []),
    (
        "another was said",
        working(WAITS._replace(described=frozenset("p"))),
        [RowsRead(P, Q, None, 110.1)],
        [DescribeMissing(["q"])],
    ),
    (
        "the round opens again: it has waited since then",
        working(late=Q),
        [RoundOpened(FIVE, 119.0), Idle(119.0), RowsRead(P, NONE, None, 120.0)],
        [KeepProducts(FIVE), ReadRows(FIVE, Q), *EMBED],
    ),
    (
        "rounds need not wait, but for half of the patience",
        working(GOES_ON),
        [RowsRead(P, Q, None, 104.9)],
        [],
    ),
    ("it is over", working(GOES_ON), [RowsRead(P, Q, None, 105.0)], EMBED),
    (
        "their names were lost: they are asked for",
        working(),
        [ProductsUnknown(), Idle(101.0), Idle(102.0)],
        [HELLO],
    ),
    (
        "the head has closed the round meanwhile",
        working(),
        [Replied(REPLY, 101.0), RowsRead(P, NONE, REPLY, 101.0)],
        [ReadRows(FIVE, NONE, REPLY), *EMBED, Learn(REPLY)],
    ),
    ("it has, and rows are late", working(), [RowsRead(P, Q, REPLY, 101.0)], []),
]
REPLIES: list[Row] = [
    ("to this round", answering(), [Replied(REPLY, 100.1)], [Learn(REPLY)]),
    ("where labels stay at the head", answering(), [Replied(graded(5), 100.1)], [Learn(graded(5))]),
    (
        "to other rounds",
        answering(),
        [Replied(represented(4), 100.1), Replied(represented(6), 100.1)],
        [],
    ),
    ("of another attempt", answering(), [Replied(represented(5, attempt=2), 100.1)], []),
    ("to none", WAITS, [Replied(REPLY, 100.1)], []),
    ("it is learnt from", answering(), [Learnt(100.1)], [FinishRound(5)]),
    ("it comes again", answering(), [Learnt(100.1), Replied(REPLY, 100.2)], [FinishRound(5)]),
    (
        "the head has closed the round without us",
        working(GOES_ON, late=Q),
        [Replied(WITHOUT_US, 100.1)],
        [FinishRound(5)],
    ),
    (
        "the same, where labels stay there",
        working(GOES_ON),
        [Replied(graded(5, 0), 100.1)],
        [FinishRound(5)],
    ),
    (
        "without another one",
        working(GOES_ON),
        [Replied(WITHOUT_OTHER, 100.1)],
        [ReadRows(FIVE, NONE, WITHOUT_OTHER)],
    ),
    (
        "without us, though all are waited for",
        working(),
        [Replied(WITHOUT_US, 100.1)],
        [ReadRows(FIVE, NONE, WITHOUT_US)],
    ),
]
HELLOS: list[Row] = [
    ("once it is connected", WAITS, [Online(), Idle(100.0), Idle(100.3)], [HELLO]),
    ("once the head is", WAITS, told(HERE), [HELLO]),
    (
        "not more often than five times a second",
        WAITS,
        [Online(), Idle(100.0), Online(), Idle(100.1), Idle(100.2), Idle(100.3)],
        [HELLO, HELLO],
    ),
    ("when the run is said to be over", WAITS, told(END), [HELLO]),
    ("not another run", WAITS, told(msgspec.structs.replace(END, run=OTHER_RUN.run)), []),
    (
        "after its last round",
        answering(WAITS._replace(played=5)),
        [Learnt(100.1), Idle(100.2)],
        [FinishRound(5), SayHello(5, "")],
    ),
    (
        "when what may have been the reply was damaged",
        answering(),
        [Unusable("topic", "why"), Idle(100.0)],
        [note(IGNORED.format("topic")), HELLO],
    ),
    (
        "not when none was awaited",
        working(),
        [Unusable("topic", "why"), Idle(100.0)],
        [note(IGNORED.format("topic")), READ],
    ),
]


@pytest.mark.parametrize(
    ("state", "events", "effects"),
    [
        pytest.param(*row, id=f"{what}: {name}")
        for what, rows in (
            ("opening", OPENINGS),
            ("samples", SAMPLES),
            ("reply", REPLIES),
            ("hello", HELLOS),
        )
        for name, *row in rows
    ],
)
def test_events_have_these_effects(
    state: Session, events: list[Event], effects: list[Effect]
) -> None:
    assert play(state, *events)[1] == effects


def test_the_head_is_told_in_words_what_a_round_waits_for_until_it_waits_no_more() -> None:
    state, effects = play(working(), Described("product q: append its row"), Idle(111.0))
    said = note("oven lacks product q: append its row; the round waits for it")
    assert effects == [said, SayHello(4, "product q: append its row"), READ]
    state, _ = play(state, RowsRead(P, NONE, None, 112.0), Online())
    assert advance(state, Idle(113.0))[1] == (HELLO,)


def test_a_file_that_lags_costs_one_wait() -> None:
    state, _ = play(
        working(GOES_ON), RowsRead(P, Q, None, 105.0), Learnt(105.0), RoundOpened(SIX, 105.0)
    )
    both = frozenset("qr")
    assert advance(state, RowsRead(("q", "r"), both, None, 105.1))[1] == (
        Embed(SIX, ("q", "r"), 105.0),
        Send(),
    )


def test_progress_is_reported_once_a_second() -> None:
    state, effects = play(
        answering(),
        Learnt(100.9),
        RoundOpened(SIX, 100.9),
        Learnt(101.0),
        RoundOpened(SEVEN, 101.0),
    )
    learning = Report(progress.Learning(node="oven", round=6, rate=2.0))
    assert effects == [
        FinishRound(5),
        KeepProducts(SIX),
        FinishRound(6),
        learning,
        KeepProducts(SEVEN),
    ]
    assert play(state, Learnt(101.9))[1] == [FinishRound(7)]


def test_what_cannot_be_meant_is_said_once_of_each_topic() -> None:
    events = [Unusable("one", "why"), Unusable("one", "another reason"), Unusable("other", "why")]
    assert play(WAITS, *events)[1] == [note(IGNORED.format("one")), note(IGNORED.format("other"))]


@pytest.mark.parametrize(
    ("state", "events", "over"),
    [
        pytest.param(WAITS, told(Finished(session=OURS, run=RUN)), True, id="the head says so"),
        pytest.param(
            WAITS, told(Finished(session=OTHERS, run=RUN)), False, id="to an earlier process"
        ),
        pytest.param(WAITS, told(END), False, id="what is retained may be old"),
        pytest.param(WAITS, [Told(AWAY), *told(END)], True, id="but nobody is there to ask"),
        pytest.param(
            WAITS, [Told(AWAY), Told(END), Idle(109.0)], False, id="somebody may come yet"
        ),
        pytest.param(
            WAITS,
            [Told(AWAY), *told(msgspec.structs.replace(END, round=5))],
            False,
            id="a round is left",
        ),
        pytest.param(WAITS, told(AWAY), False, id="it was not said that the run is over"),
        pytest.param(
            WAITS,
            [Told(Welcome(session=OURS)), Told(AWAY), *told(END)],
            False,
            id="the head was there",
        ),
        pytest.param(
            WAITS,
            [Told(Welcome(session=OTHERS)), Told(AWAY), *told(END)],
            True,
            id="another's welcome",
        ),
    ],
)
def test_it_ends(state: Session, events: list[Event], over: bool) -> None:
    assert play(state, *events)[0].over is over


def test_once_it_has_ended_nothing_moves_it() -> None:
    state, effects = play(
        working(), Online(), *told(Finished(session=OURS, run=RUN)), RoundOpened(FIVE, 200.0)
    )
    assert state.over
    assert effects == []


def test_it_is_said_that_the_head_is_away_and_back() -> None:
    events = [Told(AWAY), Told(Welcome(session=OURS)), Told(Welcome(session=OURS))]
    assert play(WAITS, *events)[1] == [
        note("the head is not connected; waiting for it"),
        note("the head is back; the next round is 5"),
    ]


def test_another_run_is_taken_part_in_by_who_has_learnt_nothing_yet() -> None:
    _, [effect] = advance(WAITS._replace(round=0), Told(OTHER_RUN))
    assert isinstance(effect, Fail)
    assert isinstance(effect.error, NewRunError)
    assert effect.error.run == OTHER_RUN.run


def test_another_run_without_this_sensor_ends_it() -> None:
    _, [effect] = advance(WAITS, Told(msgspec.structs.replace(OTHER_RUN, sensors=("press",))))
    assert isinstance(effect, Fail)
    assert not isinstance(effect.error, NewRunError)


def test_another_run_may_be_an_older_one_and_the_head_is_asked() -> None:
    assert play(WAITS, *told(OTHER_RUN))[1] == [HELLO]
    assert play(WAITS, *told(SPEC))[1] == []


def test_it_looks_often_only_for_what_no_message_brings() -> None:
    assert [
        each.is_polling for each in (WAITS, working(), answering(), advance(WAITS, Online())[0])
    ] == [
        False,
        True,
        False,
        True,
    ]
