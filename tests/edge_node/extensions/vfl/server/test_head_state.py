"""The head's state machine, without broker, clock or files."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from edge_node.extensions.vfl.messages import VflHello
from edge_node.extensions.vfl.server.head_state import (
    REPEATS,
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
    Report,
    Restore,
    Saved,
    SendEnd,
    Started,
    Step,
    Tick,
    Train,
    Trained,
    Welcome,
    advance,
    find_common_round,
)
from trainer import progress
from trainer.federation.server.membership import WINDOW

AB = ("a", "b")
WAITS = Plan(AB)
GOES_ON = Plan(AB, waits=False)  # without who is absent
COMMIT = 2  # rounds


class Effects(list[Effect]):
    """Effects in order.

    Two of different types are different, though NamedTuples are equal if their fields are.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and _typed(self) == _typed(other)

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, effect: object) -> bool:
        return any(type(each) is type(effect) and each == effect for each in self)

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return Effects(found) if isinstance(at, slice) else found

    def of(self, kind: type[Effect]) -> "Effects":
        """Those of a type."""
        return Effects(each for each in self if isinstance(each, kind))


def _typed(effects: list[Any]) -> list[tuple[type, Any]]:
    return [(type(each), each) for each in effects]


def beginning(plan: Plan = WAITS, **fields: Any) -> HeadState:
    return HeadState(plan, since=0.0, finished=0.0)._replace(**fields)


def joins(
    sensor: str, round_: int = 0, kept: Sequence[int] = (0,), now: float = 0.0, **fields: Any
) -> Joined:
    """A sensor says how far it is."""
    new = fields.pop("new", False)
    told = {"session": "0" * 16, "identity": sensor * 16, "columns": 1} | fields
    hello = VflHello(
        run="1" * 16, software="", incarnation=1, round=round_, kept=tuple(kept), **told
    )
    return Joined(sensor, hello, new, now)


def embeds(sensor: str, now: float = 0.0, **fields: bool) -> Embedded:
    """The whole of a sensor's part comes, unless fields say otherwise."""
    return Embedded(sensor, **{"news": True, "whole": True, "prompt": True} | fields, now=now)


def enact(state: HeadState, *events: Event, products: bool = True) -> tuple[HeadState, Effects]:
    """What a process does that answers at once: all effects but reports, in order."""
    effects = Effects()
    for event in events:
        pending = deque([event])
        while pending:
            state, new = advance(state, pending.popleft())
            effects += [each for each in new if not isinstance(each, Report)]
            now = getattr(event, "now", 0.0)
            pending += [made for each in new if (made := answer(each, now, products))]
    return state, effects


def answer(effect: Effect, now: float, products: bool) -> Event | None:
    match effect:
        case Load():
            return Loaded(PartyProgress(0, (0,)), now)
        case Open(round_):
            return Opened(round_, now) if products else Lacking("labels.csv", 0.0, now)
        case Train(round_):
            return Trained(PartyProgress(round_, tuple(range(0, round_ + 1, COMMIT))), now)
        case Finish():
            return Saved((0, 2, 3))
    return None


def reports(step: Step) -> list[str]:
    return [progress.format_event(each.event) for each in step[1] if isinstance(each, Report)]


def running(plan: Plan = WAITS, rounds: int = 0, **fields: Any) -> HeadState:
    """A head after so many rounds, with the next one open."""
    state, _ = enact(beginning(plan), Started(PartyProgress(0, (0,)), 0.0), joins("a"), joins("b"))
    state, _ = enact(state, *[embeds(sensor) for _ in range(rounds) for sensor in AB])
    return state._replace(**fields)


# Gathering


def test_every_sensor_is_asked_how_far_it_is_and_then_the_first_round_opens() -> None:
    state, effects = enact(beginning(), Started(PartyProgress(0, (0,)), 0.0))
    assert effects == [Gather()]
    first, second = joins("a"), joins("b")
    state, effects = enact(state, first)
    assert effects == [Admit("a", Member("a" * 16, 1)), Welcome("a", first.hello)]
    assert (state.stage, state.missing()) == ("gathering", ["b"])
    state, effects = enact(state, second)
    assert effects == [
        Admit("b", Member("b" * 16, 1)),
        Welcome("b", second.hello),
        Load(),
        Begin(),
        Open(1),
    ]
    assert (state.stage, state.missing()) == ("open", ["a", "b"])


def test_a_member_that_comes_again_as_it_was_is_not_written_down_again() -> None:
    state = running()
    _, effects = enact(state, joins("a"))
    assert not effects.of(Admit)
    _, effects = enact(state, joins("a", identity="c" * 16))
    assert Admit("a", Member("c" * 16, 1)) in effects


MEMBERS = {name: Member(name * 16, 1) for name in AB}


def test_a_federation_that_need_not_wait_begins_once_all_have_named_their_columns() -> None:
    state, _ = enact(beginning(GOES_ON), Started(PartyProgress(0, (0,)), 0.0), joins("a"))
    assert enact(state, Tick(1.1))[1] == [], "b has not named its columns"
    state = state._replace(members=MEMBERS)
    assert enact(state, Tick(0.9))[1] == []
    state, effects = enact(state, Tick(1.1))
    assert effects == [Load(), Begin(), Open(1)]
    assert state.absent == {"b"}
    alone = beginning(GOES_ON, members=MEMBERS)
    assert enact(alone, Tick(9.0))[1] == [], "nobody is there"


def test_a_federation_that_waits_says_for_whom_once() -> None:
    state, _ = enact(beginning(), Started(PartyProgress(0, (0,)), 0.0), joins("a"))
    state, effects = advance(state, Tick(1.1))
    assert reports((state, effects)) == ["round 1 waits for b"]
    assert state.paused
    assert advance(state, Tick(2.0))[1] == ()


def test_of_many_sensors_that_are_waited_for_a_few_are_named() -> None:
    names = tuple(
        f"{'a-long-name-of-a-sensor-in-a-large-plant':.50}-{number}" for number in range(64)
    )
    assert len(HeadState(Plan(names), since=0.0, finished=0.0).describe_wait()) < 1000


def test_all_go_back_to_the_newest_round_that_all_have_on_their_disks() -> None:
    own = PartyProgress(7, (2, 4, 6))
    state, _ = enact(beginning(), Started(own, 0.0), joins("a", 7, (2, 4, 6)))
    after, effects = enact(state, joins("b", 4, (0, 2, 4)))
    assert effects[2:] == [Restore(4), Begin(), Open(5)]
    assert after.progress == PartyProgress(4, (2, 4))
    step = advance(state, joins("b", 4, (0, 2, 4)))
    assert "from round 7 to round 4" in "\n".join(reports(step))
    _, effects = enact(state, joins("b", 7, (2, 4, 6)))
    assert effects[2:] == [Begin(), Open(8)], "nobody has to"


def test_a_federation_that_need_not_wait_never_goes_back() -> None:
    started = Started(PartyProgress(7, (2, 4, 6)), 0.0)
    state, effects = enact(
        beginning(GOES_ON), started, joins("a", 7, (2, 4, 6)), joins("b", 4, (0, 2, 4))
    )
    assert effects[-2:] == [Begin(), Open(8)]
    assert state.progress.round == 7


@pytest.mark.parametrize(("theirs", "older"), [((0, 2), "sensor's"), ((12, 14), "head's")])
def test_a_sensor_that_shares_no_round_with_the_head_is_refused_and_told_whose_disk_is_the_older(
    theirs: tuple[int, ...], older: str
) -> None:
    started = Started(PartyProgress(10, (4, 6, 8, 10)), 0.0)
    state, effects = enact(
        beginning(), started, joins("a", 10, (8, 10)), joins("b", max(theirs), theirs)
    )
    [refused] = effects.of(Refuse)
    assert isinstance(refused, Refuse)
    assert refused.sensor == "b"
    assert refused.reason == f"it can go back to rounds {theirs}, the head to (4, 6, 8, 10)"
    assert f"the newer of the {older} --state folder" in refused.remedy
    assert (state.gathering, state.missing()) == (True, ["b"])
    _, effects = enact(state, joins("b", 10, (8, 10)))
    assert effects[-1:] == [Open(11)], "with the newer folder"


def test_of_two_sensors_that_share_rounds_only_with_the_head_the_older_is_refused() -> None:
    started = Started(PartyProgress(8, (2, 4, 6, 8)), 0.0)
    for sensors in (
        [joins("a", 4, (2, 4)), joins("b", 8, (6, 8))],
        [joins("b", 8, (6, 8)), joins("a", 4, (2, 4))],
    ):
        state, effects = enact(beginning(), started, *sensors)
        assert [each.sensor for each in effects.of(Refuse)] == ["a"]
        assert state.missing() == ["a"]
        _, effects = enact(state, joins("a", 6, (4, 6)))
        assert effects[-3:] == [Restore(6), Begin(), Open(7)]


def test_columns_can_change_until_the_first_round_is_closed() -> None:
    state, _ = enact(beginning(), Started(PartyProgress(0, (0,)), 0.0), joins("a"))
    state, effects = enact(state, joins("a", columns=2), joins("b"))
    assert Admit("a", Member("a" * 16, 2)) in effects
    assert Load() in effects
    state, _ = enact(state, embeds("a"), embeds("b"))
    state, effects = enact(state, joins("a", 1, columns=3))
    [rejected] = effects
    assert isinstance(rejected, Reject)
    assert rejected.refusal.reason == "a had 2 columns, and now has 3"
    assert state.members["a"].columns == 2


# Rounds


def test_a_round_closes_when_all_parts_are_there_and_then_the_next_opens() -> None:
    state, effects = enact(running(), embeds("a"), embeds("b"))
    assert effects == [Close(1), Open(2), Train(1)]
    assert (state.round, state.missing()) == (1, ["a", "b"])


@pytest.mark.parametrize(
    ("events", "effects"),
    [
        pytest.param(
            [embeds("a"), embeds("a", news=False, whole=False)], [], id="parts count once"
        ),
        pytest.param([embeds("a"), embeds("b", whole=False)], [], id="half a part is none"),
        pytest.param(
            [embeds("a"), Lost("b"), embeds("b")],
            [Close(1), Open(2), Train(1)],
            id="parts outlive the loss",
        ),
        pytest.param(
            [embeds("a"), Lost("a"), Lost("b"), Tick(9.0)],
            [RepeatOpening("b")],
            id="the lost are waited for",
        ),
    ],
)
def test_events_of_a_round_have_these_effects(events: list[Event], effects: list[Effect]) -> None:
    assert enact(running(), *events)[1] == effects


def test_embeddings_that_come_while_no_round_is_open_are_without_effect() -> None:
    for state in (beginning(), running(WAITS._replace(rounds=1), 1)):
        assert advance(state, embeds("a"))[1] == ()


def test_after_the_last_round_it_is_written_down_and_the_end_is_published() -> None:
    state, effects = enact(running(WAITS._replace(rounds=3), 2), embeds("a"), embeds("b"))
    assert effects == [Close(3), Train(3), Finish()]
    assert state.stage == "finished"
    assert state.progress.kept == (0, 2, 3)


def test_without_products_the_head_looks_for_them_at_every_tick_and_soon_says_so_once() -> None:
    state, effects = enact(running(), embeds("a"), embeds("b"), products=False)
    assert effects == [Close(1), Open(2), Train(1)]
    assert state.awaits_products
    for now in (0.1, 9.0, 10.1, 20.0):
        state, effects = enact(state, Tick(now), products=False)
        assert effects == [Open(2)]
        assert state.paused == (now > 10), "products come one by one"
        assert state.awaited == ("waiting for more products in labels.csv" if now > 10 else "")
    state, effects = enact(state, Tick(21.0))
    assert effects == [Open(2)]
    assert not state.awaits_products
    assert not enact(state, embeds("a"), embeds("b"))[0].paused


# Waiting in a round


def test_who_has_not_answered_is_asked_again_after_ever_longer_waits() -> None:
    state, asked = running(Plan(AB, patience=1e9)), []
    state, _ = enact(state, embeds("a"))
    for now in range(100):
        state, effects = enact(state, Tick(float(now)))
        if effects:
            assert effects == [RepeatOpening("b")]
            asked.append(now)
    assert asked == [2, 5, 10, 19, 36, 67, 98]


def test_nobody_is_asked_again_while_rows_come() -> None:
    state = running()
    for now in (0.5, 1.4, 2.3):
        state, effects = enact(state, embeds("a", now, whole=False), Tick(now + 0.9))
        assert effects == []


def test_a_round_waits_for_who_is_late_and_goes_on_when_it_comes() -> None:
    state, _ = enact(running(), embeds("a"))
    state, effects = advance(state, Tick(1.5))
    assert reports((state, effects)) == ["round 1 waits for b"]
    assert state.paused
    state, effects = enact(state, embeds("b", 60.0))
    assert effects == [Close(1), Open(2), Train(1)]
    assert not state.paused


def test_a_round_that_need_not_wait_goes_on_without_who_is_late_but_not_without_anybody() -> None:
    state, _ = enact(running(GOES_ON), Tick(0.9))
    assert state.absent == set()
    alone, effects = enact(state, embeds("a", 0.9), Tick(1.1))
    assert effects == [Close(1), Open(2), Train(1)]
    assert alone.absent == {"b"}
    _, effects = enact(alone, embeds("a", 1.2))
    assert effects == [Close(2), Open(3), Train(2)], "it is not waited for again"
    nobody, effects = enact(state, Tick(1.1))
    assert nobody.absent == {"a", "b"}
    assert not effects.of(Close)


def test_a_sensor_whose_rows_drip_is_late_after_a_long_time() -> None:
    state, _ = enact(running(GOES_ON), embeds("a"))
    for step in range(1, 20):
        state, effects = enact(state, embeds("b", step / 2, whole=False), Tick(step / 2))
        assert effects == []
    _, effects = enact(state, embeds("b", 10.0, whole=False), Tick(10.1))
    assert effects[:1] == [Close(1)]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        pytest.param(
            embeds("b", news=False, whole=False), True, id="the end of an earlier round, in time"
        ),
        pytest.param(embeds("b", news=False, whole=False, prompt=False), False, id="late again"),
        pytest.param(joins("b", new=True), True, id="another process"),
        pytest.param(joins("b"), False, id="the same process"),
    ],
)
def test_an_absent_sensor_is_waited_for_again_when_it_is_fast_enough_or_has_started_again(
    event: Event, expected: bool
) -> None:
    state, _ = enact(running(GOES_ON, absent=frozenset("b")), event)
    assert ("b" not in state.absent) is expected
    closes = Close(1) in enact(state, embeds("a"))[1]
    assert closes is not expected


# Sensors that come again


@pytest.mark.parametrize(
    ("plan", "behind", "effects"),
    [
        (WAITS, 0, [RepeatOpening("a")]),
        (WAITS, 1, [RepeatRound("a"), RepeatOpening("a")]),
        (WAITS, 2, [Gather()]),
        (WAITS, -1, [Gather()]),
        (GOES_ON, 1, [RepeatRound("a"), RepeatOpening("a")]),
        (GOES_ON, 2, [RepeatOpening("a")]),
        (GOES_ON, -1, [RepeatOpening("a")]),
    ],
)
def test_a_sensor_is_sent_what_it_has_missed_or_all_go_back_to_where_it_is(
    plan: Plan, behind: int, effects: list[Effect]
) -> None:
    state = running(plan, 3)
    assert enact(state, joins("a", 3 - behind))[1][1:] == effects


def test_after_a_restart_nothing_is_left_of_the_round_before() -> None:
    state, _ = enact(
        beginning(),
        Started(PartyProgress(2, (0, 2)), 0.0),
        joins("a", 2, (0, 2)),
        joins("b", 2, (0, 2)),
    )
    assert enact(state, joins("a", 1, (0,)))[1][1:] == [Gather()]


def test_a_sensor_that_asks_again_and_again_has_to_wait_for_the_next_round_or_a_while() -> None:
    state, effects = enact(running(), *[joins("a")] * REPEATS)
    assert effects.of(RepeatOpening) == [RepeatOpening("a")] * REPEATS
    step = advance(state, joins("a"))
    assert "a asks for the same round again" in "\n".join(reports(step))
    assert not any(isinstance(each, RepeatOpening) for each in step[1])
    assert RepeatOpening("b") in enact(state, joins("b"))[1], "another one need not"
    assert RepeatOpening("a") in enact(state, joins("a", now=WINDOW + 1))[1]
    assert RepeatOpening("a") in enact(state, embeds("a"), embeds("b"), joins("a", 1))[1]


def test_who_comes_and_goes_is_reported_once() -> None:
    state = running()
    state, effects = advance(state, Lost("a"))
    assert [each.event for each in effects if isinstance(each, Report)] == [
        progress.NodeLost(node="a", round=0)
    ]
    assert advance(state, Lost("a"))[1] == ()
    _, effects = advance(state, joins("a"))
    assert Report(progress.NodeJoined(node="a")) in effects
    assert Report(progress.NodeJoined(node="b")) not in advance(state, joins("b"))[1]
    state, effects = advance(state, Excluded("b"))
    assert (state.present, effects) == (set(), ())


def test_what_a_sensor_lacks_is_reported_when_it_changes_and_forgotten_with_its_part() -> None:
    step = advance(running(), joins("a", lacks="product p5"))
    assert "waits for a, which lacks product p5" in "\n".join(reports(step))
    state = step[0]
    assert reports(advance(state, joins("a", lacks="product p5"))) == []
    assert reports(advance(state, joins("a", lacks="product p6"))) != []
    state, _ = enact(state, embeds("a"))
    assert not state.lacks["a"]
    assert reports(advance(state, joins("a", lacks="product p5"))) != []


# The end


def finished(plan: Plan = WAITS) -> HeadState:
    return running(plan._replace(rounds=2), 2)


def test_the_head_ends_when_all_have_written_down_the_last_round_or_after_a_while() -> None:
    state, _ = enact(finished(), Finished("a"), Tick(0.1))
    assert not state.ended
    assert enact(state, Finished("b"), Tick(0.1))[0].ended
    assert not enact(state, Tick(29.9))[0].ended
    assert enact(state, Tick(30.1))[0].ended
    assert enact(state._replace(absent=frozenset("b")), Tick(0.1))[0].ended, "b is not expected to"
    early, _ = enact(running(), Finished("a"))
    assert not early.done, "nothing has ended"


@pytest.mark.parametrize(
    ("plan", "round_", "told"),
    [(WAITS, 2, True), (WAITS, 1, False), (GOES_ON, 2, True), (GOES_ON, 0, True)],
)
def test_a_sensor_that_comes_after_the_last_round_is_told_once_it_need_not_catch_up(
    plan: Plan, round_: int, told: bool
) -> None:
    assert (SendEnd("a") in enact(finished(plan), joins("a", round_))[1]) is told


def test_the_last_rounds_are_played_once_more_if_a_sensor_comes_back_without_them() -> None:
    state, effects = enact(finished(), joins("a", 0, (0,)))
    assert effects[-1:] == [Gather()]
    state, effects = enact(state, joins("a", 0, (0,), now=1.0), joins("b", 2, (0, 2), now=1.0))
    assert effects[-3:] == [Restore(0), Begin(), Open(1)]
    assert (state.round, state.is_over) == (0, False)


def test_who_had_written_down_the_last_round_does_so_again_when_it_is_played_once_more() -> None:
    state, _ = enact(finished(), Finished("b"), joins("a", 0, (0,)))
    state, effects = enact(
        state, joins("a", 0, (0,)), joins("b", 2, (0, 2)), *[embeds(sensor) for sensor in "abab"]
    )
    assert effects[-1:] == [Finish()]
    assert not enact(state, Finished("a"), Tick(0.1))[0].ended
    assert enact(state, Finished("a"), Finished("b"), Tick(0.1))[0].ended


def test_the_end_waits_for_who_came_back_without_the_last_round_while_it_is_there() -> None:
    state, _ = enact(finished(), joins("a", 0, (0,)), joins("a", 0, (0,)))
    step = advance(state, Tick(40.0))
    assert not step[0].ended
    assert reports(step) == [
        (
            "a came back without round 2, and b has ended: start b again, and the last rounds "
            "are played once more"
        )
    ]
    assert enact(step[0], Lost("a"), Lost("b"), Tick(41.0))[0].ended


def test_a_head_restarted_after_the_last_round_ends_when_all_have_said_that_they_have_it() -> None:
    started = Started(PartyProgress(2, (0, 2)), 0.0)
    state, effects = enact(
        beginning(Plan(AB, 2)), started, joins("a", 2, (0, 2)), joins("b", 2, (0, 2))
    )
    assert effects[-3:] == [Begin(), Finish(), SendEnd("b")]
    assert SendEnd("a") in effects
    assert enact(state, Finished("a"), Finished("b"), Tick(0.1))[0].ended


# The round to go on from


@pytest.mark.parametrize(
    ("head", "sensors", "expected"),
    [
        (PartyProgress(40, (20, 40)), {"a": PartyProgress(40, (20, 40))}, 40),
        (
            PartyProgress(47, (20, 40)),
            {"a": PartyProgress(47, (20, 40)), "b": PartyProgress(40, (20, 40))},
            40,
        ),
        (
            PartyProgress(40, (20, 40)),
            {"a": PartyProgress(40, (20, 40)), "b": PartyProgress(20, (0, 20))},
            20,
        ),
        (PartyProgress(20, (0, 20)), {"a": PartyProgress(41, (20, 40))}, 20),
        (PartyProgress(3, (0,)), {"a": PartyProgress(0, (0,))}, 0),
        (PartyProgress(50, (40, 50)), {"a": PartyProgress(50, (40, 50))}, 50),
        (PartyProgress(60, (40, 60)), {"a": PartyProgress(0, (0,))}, None),
    ],
)
def test_a_federation_goes_on_from_the_newest_round_that_all_can_be_at(
    head: PartyProgress, sensors: dict[str, PartyProgress], expected: int | None
) -> None:
    assert find_common_round(head, sensors) == expected
