"""The coordinator's overview says who does what and who is waited for, and fits into a message."""

import itertools
import random
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from broker_config.protocol.codec import MAX_MESSAGE, decode, encode
from broker_config.protocol.messages import NodeState, Overview
from broker_config.security.member_list import Member, MemberList
from tests.support.manual_clock import Clock
from tests.support.node_model import make_broadcast, make_delta, make_spec
from tests.support.round_events import contributed, joined
from tests.support.wire_messages import SPEC
from trainer import progress
from trainer.federation.server.coordinator.events import Event, Expired, Left
from trainer.federation.server.coordinator.round_machine import advance
from trainer.federation.server.coordinator.round_state import Federation, Plan, restore
from trainer.federation.server.status import EVERY, StatusTracker, round_message

ERROR = "its message cannot be read: JSON is malformed: invalid character (byte 0)"


def after(*events: Event, plan: Plan = Plan(3, 2, 5)) -> Federation:  # noqa: B008
    state = Federation(plan)
    for event in events:
        state, _ = advance(state, event)
    return state


def tracked(
    *events: progress.AnyEvent, nodes: str = "abc", clock: Clock | None = None
) -> StatusTracker:
    tracker = StatusTracker(SPEC, clock or Clock())
    for event in (*(progress.NodeJoined(node=node) for node in nodes), *events):
        tracker.record(event)
    return tracker


def told(tracker: StatusTracker, state: Federation, *finished: str) -> Overview:
    overview = tracker.next_overview(state, finished, anyway=True)
    assert overview is not None
    return overview


def seen(tracker: StatusTracker, state: Federation, *finished: str) -> dict[str, NodeState]:
    """The nodes of the overview as it comes out of its bytes."""
    overview = decode(encode(told(tracker, state, *finished)), Overview)
    assert overview.more == 0
    return {node.node: node for node in overview.nodes}


THREE = (joined("a"), joined("b"), joined("c"))


def test_until_the_first_round_is_open_there_is_neither_a_broadcast_nor_a_delta_to_fetch() -> None:
    spec = make_spec()
    broadcast, delta = make_broadcast(spec, 1), make_delta(spec, 1)
    gathering, opened = (
        round_message(spec, state, broadcast, delta) for state in (after(), after(*THREE))
    )
    assert (gathering.status, gathering.broadcast, gathering.delta) == ("gathering", None, None)
    assert (opened.status, opened.broadcast, opened.delta) == ("open", broadcast, delta)


def test_where_there_is_a_charter_it_says_when_the_members_certificates_end() -> None:
    end = datetime(2027, 3, 1, tzinfo=UTC)
    ends = {name: end + timedelta(days=days) for days, name in enumerate("abz")}
    members = {name: Member("0" * 64, when) for name, when in ends.items()}
    member_list = MemberList(
        federation="steel",
        version=1,
        issued=end,
        expires=end,
        coordinator=Member("1" * 64, end),
        nodes=members,
    )
    tracker = StatusTracker(SPEC, member_list=member_list)
    for name in "abc":
        tracker.record(progress.NodeJoined(node=name))
    told = seen(tracker, after(*THREE))
    assert {name: node.expires for name, node in told.items()} == {
        "a": ends["a"],
        "b": ends["b"],
        "c": None,
    }


def test_it_says_where_the_round_is_and_when_that_was() -> None:
    before = datetime.now(UTC)
    overview = told(tracked(), after(*THREE, contributed("b")))
    assert before <= overview.time <= datetime.now(UTC)
    facts = (
        overview.run,
        overview.round,
        overview.rounds,
        overview.status,
        overview.contributions,
        overview.quorum,
    )
    assert facts == (SPEC.run, 1, 5, "open", 1, 2)
    assert (overview.left, overview.paused) == (None, False)
    assert told(tracked(), after()).status == "gathering"


def test_the_deadline_counts_from_when_the_round_was_opened() -> None:
    clock = Clock()
    tracker = StatusTracker(msgspec.structs.replace(SPEC, deadline=60.0), clock)
    clock.now += 100
    tracker.record(progress.RoundOpened(round=1))
    clock.now += 20
    assert told(tracker, after()).left is None
    assert told(tracker, after(*THREE)).left == 40
    clock.now += 100
    assert told(tracker, after(*THREE)).left == 0


def test_those_whom_the_round_waits_for_are_marked_and_come_first() -> None:
    overview = told(tracked(), after(*THREE, contributed("a")))
    assert [(node.node, node.awaited) for node in overview.nodes] == [
        ("b", True),
        ("c", True),
        ("a", False),
    ]


def test_the_absent_are_waited_for_while_the_round_is_paused() -> None:
    one_gone = after(*THREE, Left("c"))
    nodes = seen(tracked(progress.NodeLost(node="c", round=1)), one_gone)
    assert (nodes["c"].doing, nodes["c"].awaited) == ("absent", False)
    assert nodes["c"].error == "round 1: its connection ended"
    two_gone, _ = advance(one_gone, Left("b"))
    overview = told(tracked(), two_gone)
    assert overview.paused
    assert all(node.awaited for node in overview.nodes)


def test_nobody_waits_for_nodes_that_were_not_drawn() -> None:
    state = after(*THREE, plan=Plan(3, 1, 5, sample=1, seed=random.randrange(1000)))
    nodes = seen(tracked(), state)
    assert {name for name, node in nodes.items() if node.awaited} == set(state.drawn)


def test_a_node_is_late_once_the_deadline_is_over_unless_its_bytes_are_under_way() -> None:
    sending = progress.Activity(node="c", round=1, what="sending", done=40, total=100)
    nodes = seen(tracked(sending), after(*THREE, contributed("a"), Expired(1)))
    assert {name: node.doing for name, node in nodes.items()} == {
        "a": "waiting",
        "b": "late",
        "c": "sending",
    }
    assert (nodes["c"].done, nodes["c"].total) == (40, 100)


def test_a_contribution_that_came_too_late_is_an_error_of_its_node() -> None:
    node = seen(tracked(progress.Late(node="a", round=1)), after(*THREE))["a"]
    assert node.error == "round 1: it contributed too late, and was not counted"


def test_a_contribution_is_remembered_with_its_round_its_weight_and_all_bytes_so_far() -> None:
    made = [
        progress.Contribution(node="a", round=number, weight=number / 4, bytes=10)
        for number in (1, 2)
    ]
    node = seen(tracked(*made), after(*THREE))["a"]
    assert (node.round, node.weight, node.bytes) == (2, 0.5, 20)


def test_a_contribution_clears_an_error_but_not_that_its_node_has_gone_since() -> None:
    lost = progress.NodeLost(node="a", round=1)
    arrived = progress.Contribution(node="a", round=1, weight=0.5, bytes=10)
    gone = seen(tracked(lost, arrived), after(*THREE))["a"]
    assert (gone.error, gone.weight) == ("round 1: its connection ended", 0.5)
    assert (
        seen(tracked(lost, progress.NodeJoined(node="a"), arrived), after(*THREE))["a"].error == ""
    )


def test_after_a_restart_the_members_are_there_with_what_the_journal_knows() -> None:
    state = restore(Plan(3, 2, 5), 4, "abc", (), "b")
    nodes = seen(tracked(nodes=""), state)
    assert {name: (node.round, node.awaited) for name, node in nodes.items()} == {
        "a": (0, True),
        "b": (4, False),
        "c": (0, True),
    }


def test_the_seconds_since_a_node_was_heard_begin_anew_with_each_message_and_byte() -> None:
    clock = Clock()
    tracker = tracked(clock=clock)
    state = after(*THREE)
    for seconds, event in (
        (5, None),
        (7, progress.Activity(node="b", round=1, what="sending", done=1, total=9)),
    ):
        clock.now = seconds
        if event:
            tracker.record(event)
        else:
            tracker.record_message("a")
    # says the coordinator of itself
    tracker.record(progress.Activity(node="c", round=1, what="training"))
    clock.now = 10
    assert {name: node.heard for name, node in seen(tracker, state).items()} == {
        "a": 5,
        "b": 3,
        "c": 10,
    }


def test_a_refused_node_stays_with_the_reason_until_it_is_back() -> None:
    tracker = tracked(progress.NodeRefused(node="b", round=2, reason=ERROR))
    node = seen(tracker, after(*THREE, Left("b")))["b"]
    assert (node.doing, node.awaited, node.error) == ("refused", False, f"round 2: {ERROR}")
    tracker.record(progress.NodeJoined(node="b"))
    assert seen(tracker, after(*THREE))["b"].doing == "waiting"


def test_a_node_that_has_its_model_is_finished_even_when_it_is_gone() -> None:
    assert seen(tracked(), after(*THREE, Left("a")), "a")["a"].doing == "finished"


def test_names_that_anybody_makes_up_do_not_pile_up() -> None:
    tracker = tracked()
    for number in range(1000):
        tracker.record(progress.NodeRefused(node=f"stranger-{number}", round=1, reason=ERROR))
    names = set(seen(tracker, after(*THREE)))
    assert {"a", "b", "c", "stranger-999"} <= names
    assert len(names) < 30


def test_one_is_due_when_something_has_changed_and_at_most_once_a_second() -> None:
    clock = Clock()
    tracker, state = tracked(clock=clock), after(*THREE)
    assert tracker.next_overview(state, ())
    clock.now += 10
    assert tracker.next_overview(state, ()) is None  # nothing has changed
    tracker.record_message("a")
    assert tracker.next_overview(state, ())
    clock.now += EVERY / 2
    tracker.record_message("a")
    assert tracker.next_overview(state, ()) is None  # too soon
    assert tracker.next_overview(state, (), anyway=True)
    tracker.record_message("a")
    clock.now += EVERY
    assert tracker.next_overview(state, ())
    clock.now += EVERY
    assert tracker.next_overview(advance(state, contributed("a"))[0], ())


def full(nodes: int, error: str) -> Overview:
    """Of so many nodes with the longest names; the last three have yet to contribute."""
    names = [f"{number:04}".ljust(64, "x") for number in range(nodes)]
    state = after(*map(joined, names), *map(contributed, names[:-3]), plan=Plan(nodes, nodes, 5))
    tracker = tracked(
        *(
            progress.Contribution(node=name, round=1, weight=0.6931471805599453, bytes=9_123_456)
            for name in names
        ),
        *(progress.NodeRefused(node=name, round=1, reason=error) for name in names if error),
        *(progress.NodeJoined(node=name) for name in names),
        nodes="",
    )
    for name in names:
        tracker.record_message(name)
    return told(tracker, state)


def test_two_hundred_nodes_fit_into_a_message() -> None:
    overview = full(200, "e" * 5000)
    assert len(encode(overview)) <= MAX_MESSAGE
    assert (len(overview.nodes), overview.more) == (200, 0)


@pytest.mark.parametrize("error", ["", "\x00" * 5000, "ä" * 5000])
def test_of_more_nodes_than_fit_those_that_hold_up_the_round_are_listed_and_the_others_counted(
    error: str,
) -> None:
    overview = full(1500, error)
    assert 0.9 * MAX_MESSAGE < len(encode(overview)) <= MAX_MESSAGE
    assert [
        node.node[:4] for node in itertools.takewhile(lambda node: node.awaited, overview.nodes)
    ] == ["1497", "1498", "1499"]
    assert len(overview.nodes) + overview.more == 1500
    assert overview.more > 0
