"""Who may speak for a node, told by state folders (identity), processes (incarnation) and sessions."""

import itertools

import pytest

from broker_config.protocol.messages import Hello
from trainer.federation.server.membership import GRACE, MOST, STRIKES, WINDOW, Roster

RUN, A, B = "0" * 16, "a" * 16, "b" * 16
sessions = (f"{number:016x}" for number in itertools.count())


def hello(identity: str = A, incarnation: int = 1, session: str | None = None, run: str = RUN) -> Hello:
    session = session or next(sessions)
    return Hello(session=session, run=run, software="", identity=identity, incarnation=incarnation)


def admitted(roster: Roster, identities: dict[str, str], node: str, message: Hello) -> None:
    assert roster.objection(node, message, RUN, present=False) is None
    identities[node] = message.identity
    roster.admit(node, message)


def test_a_restarted_node_speaks_for_its_name_at_once_though_the_broker_has_not_noticed_its_end() -> None:
    roster = Roster(1, identities := {})
    admitted(roster, identities, "n", hello())
    again = hello(incarnation=2)
    assert roster.objection("n", again, RUN, present=True) is None
    assert not roster.is_stale("n", again)
    roster.admit("n", again)
    assert roster.session("n") == again.session


def test_another_state_folder_under_a_connected_name_is_refused_and_under_one_that_left_is_not() -> None:
    roster = Roster(1, identities := {})
    admitted(roster, identities, "n", hello())
    refusal = roster.objection("n", hello(B), RUN, present=True)
    assert refusal is not None
    assert "taken" in refusal.reason
    assert roster.objection("n", hello(B), RUN, present=False) is None


def test_a_delayed_hello_of_an_earlier_process_is_stale() -> None:
    roster = Roster(1, identities := {})
    first, second = hello(), hello(incarnation=2)
    admitted(roster, identities, "n", first)
    roster.admit("n", second)
    assert roster.objection("n", first, RUN, present=True) is None
    assert roster.is_stale("n", first)
    assert not roster.is_stale("n", second)


@pytest.mark.parametrize("present", [True, False])
def test_a_node_without_identity_is_known_by_its_session(present: bool) -> None:
    roster = Roster(1, identities := {})
    first = hello("")
    admitted(roster, identities, "n", first)
    assert roster.objection("n", first, RUN, present=present) is None
    assert (roster.objection("n", hello(""), RUN, present=present) is not None) == present


def test_after_a_restart_of_the_coordinator_the_identity_on_disk_counts() -> None:
    roster = Roster(1, {"n": A})
    assert roster.objection("n", hello(A, 7), RUN, present=True) is None
    assert roster.objection("n", hello(B), RUN, present=True) is not None


def test_there_are_so_many_places_and_each_is_kept() -> None:
    roster = Roster(2, {"a": A, "b": B})
    refusal = roster.objection("c", hello("c" * 16), RUN, present=False)
    assert refusal is not None
    assert "its 2 nodes are a, b" in refusal.reason


def test_the_nodes_of_another_run_are_refused() -> None:
    refusal = Roster(2, {}).objection("a", hello(run="1" * 16), RUN, present=False)
    assert refusal is not None
    assert "run" in refusal.reason


def test_who_is_doubted_and_gives_no_sign_of_life_is_named_once() -> None:
    roster = Roster(2, identities := {})
    admitted(roster, identities, "a", hello())
    roster.doubt(["a", "b"], now=100.0)
    roster.admit("a", hello(incarnation=2))
    assert roster.silent(100.0 + GRACE) == []
    assert roster.silent(100.1 + GRACE) == ["b"]
    assert roster.silent(1000.0 + GRACE) == []


def test_a_node_may_send_many_messages_but_no_flood() -> None:
    roster = Roster(2, {})
    assert not any(roster.floods("a", 5.0) for _ in range(MOST))
    assert roster.floods("a", 5.0)
    assert not roster.floods("b", 5.0)
    assert not roster.floods("a", 6.0 + WINDOW)


def test_the_same_refusal_is_told_once_until_the_sender_is_let_in() -> None:
    roster = Roster(2, identities := {})
    assert [roster.is_news("refused", node) for node in ("a", "a", "b", "b")] == [True, False, True, False]
    admitted(roster, identities, "a", hello())
    roster.dismiss("a")
    assert roster.is_news("refused", "a")
    assert not roster.is_news("refused", "b")


def test_who_was_refused_three_times_stays_out() -> None:
    roster = Roster(2, identities := {})
    for _ in range(STRIKES):
        admitted(roster, identities, "a", hello())
        roster.dismiss("a")
    refusal = roster.objection("a", hello(), RUN, present=False)
    assert refusal is not None
    assert f"{STRIKES} times" in refusal.reason
