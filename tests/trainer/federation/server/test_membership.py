"""Who may speak for a node, told by state folders (identity), processes
(incarnation) and sessions.
"""

import itertools

import msgspec
import pytest

from broker_config.protocol.messages import Hello
from trainer.federation.server.membership import GRACE, MAX_MESSAGES, STRIKES, WINDOW, Membership

RUN, A, B = "0" * 16, "a" * 16, "b" * 16
sessions = (f"{number:016x}" for number in itertools.count())


def hello(
    identity: str = A, incarnation: int = 1, session: str | None = None, run: str = RUN
) -> Hello:
    session = session or next(sessions)
    return Hello(session=session, run=run, software="", identity=identity, incarnation=incarnation)


def admitted(membership: Membership, identities: dict[str, str], node: str, message: Hello) -> None:
    assert membership.find_objection(node, message, RUN, present=False) is None
    identities[node] = message.identity
    membership.admit(node, message)


def test_a_restarted_node_speaks_for_its_name_before_the_broker_has_noticed_its_end() -> None:
    membership = Membership(1, identities := {})
    admitted(membership, identities, "n", hello())
    again = hello(incarnation=2)
    assert membership.find_objection("n", again, RUN, present=True) is None
    assert not membership.is_stale("n", again, present=True)
    membership.admit("n", again)
    assert membership.session("n") == again.session


def test_another_state_folder_is_refused_under_a_connected_name_only() -> None:
    membership = Membership(1, identities := {})
    admitted(membership, identities, "n", hello())
    refusal = membership.find_objection("n", hello(B), RUN, present=True)
    assert refusal is not None
    assert "taken" in refusal.reason
    assert membership.find_objection("n", hello(B), RUN, present=False) is None


def test_who_sends_no_key_is_told_which_version_cannot_read_encrypted_messages() -> None:
    membership, old = Membership(1, {}), hello()
    refusal = membership.find_objection(
        "n", msgspec.structs.replace(old, software="0.1.0"), RUN, present=False, needs_key=True
    )
    assert refusal is not None
    assert "edge-node 0.1.0 of this node" in refusal.reason
    with_key = msgspec.structs.replace(old, key="ab" * 32)
    assert membership.find_objection("n", with_key, RUN, present=False, needs_key=True) is None
    assert membership.find_objection("n", old, RUN, present=False) is None


def test_a_delayed_hello_of_an_earlier_process_is_stale() -> None:
    membership = Membership(1, identities := {})
    first, second = hello(), hello(incarnation=2)
    admitted(membership, identities, "n", first)
    membership.admit("n", second)
    assert membership.find_objection("n", first, RUN, present=True) is None
    for present in (True, False):
        assert membership.is_stale("n", first, present=present)
        assert not membership.is_stale("n", second, present=present)


def test_a_state_folder_restored_from_a_copy_is_let_in_once_the_newer_process_has_gone() -> None:
    membership = Membership(1, identities := {})
    newer, restored = hello(incarnation=7), hello(incarnation=5)
    admitted(membership, identities, "n", newer)
    assert membership.is_stale("n", restored, present=True)
    assert not membership.is_stale("n", restored, present=False)
    membership.admit("n", restored)
    assert membership.is_stale("n", newer, present=True)
    assert not membership.is_stale("n", hello(incarnation=6), present=True)


@pytest.mark.parametrize("present", [True, False])
def test_a_node_without_identity_is_known_by_its_session(present: bool) -> None:
    membership = Membership(1, identities := {})
    first = hello("")
    admitted(membership, identities, "n", first)
    assert membership.find_objection("n", first, RUN, present=present) is None
    assert (membership.find_objection("n", hello(""), RUN, present=present) is not None) == present


def test_after_a_restart_of_the_coordinator_the_identity_on_disk_counts() -> None:
    membership = Membership(1, {"n": A})
    assert membership.find_objection("n", hello(A, 7), RUN, present=True) is None
    assert membership.find_objection("n", hello(B), RUN, present=True) is not None


def test_there_are_so_many_places_and_each_is_kept() -> None:
    membership = Membership(2, {"a": A, "b": B})
    refusal = membership.find_objection("c", hello("c" * 16), RUN, present=False)
    assert refusal is not None
    assert "nodes are a, b" in refusal.reason


def test_the_nodes_of_another_run_are_refused() -> None:
    refusal = Membership(2, {}).find_objection("a", hello(run="1" * 16), RUN, present=False)
    assert refusal is not None
    assert "run" in refusal.reason


def test_who_is_doubted_and_gives_no_sign_of_life_is_named_once() -> None:
    membership = Membership(2, identities := {})
    admitted(membership, identities, "a", hello())
    membership.expect_answers(["a", "b"], now=100.0)
    membership.admit("a", hello(incarnation=2))
    assert membership.pop_silent(100.0 + GRACE) == []
    assert membership.pop_silent(100.1 + GRACE) == ["b"]
    assert membership.pop_silent(1000.0 + GRACE) == []


def test_a_node_may_send_many_messages_but_no_flood() -> None:
    membership = Membership(2, {})
    assert not any(membership.is_flooding("a", 5.0) for _ in range(MAX_MESSAGES))
    assert membership.is_flooding("a", 5.0)
    assert not membership.is_flooding("b", 5.0)
    assert not membership.is_flooding("a", 6.0 + WINDOW)


def test_the_same_refusal_is_told_once_until_the_sender_is_let_in() -> None:
    membership = Membership(2, identities := {})
    assert [membership.is_first_report("refused", node) for node in ("a", "a", "b", "b")] == [
        True,
        False,
        True,
        False,
    ]
    admitted(membership, identities, "a", hello())
    membership.expel("a")
    assert membership.is_first_report("refused", "a")
    assert not membership.is_first_report("refused", "b")


def test_who_was_refused_three_times_stays_out() -> None:
    membership = Membership(2, identities := {})
    for _ in range(STRIKES):
        admitted(membership, identities, "a", hello())
        membership.expel("a")
    refusal = membership.find_objection("a", hello(), RUN, present=False)
    assert refusal is not None
    assert f"{STRIKES} times" in refusal.reason


def test_a_newcomer_to_a_finished_run_takes_no_place_but_no_connected_nodes_name_either() -> None:
    membership = Membership(1, identities := {})
    admitted(membership, identities, "n", hello())
    full = membership.find_objection("m", hello(B), RUN, present=False)
    assert full is not None
    assert "full" in full.reason
    assert membership.find_objection("m", hello(B), RUN, present=False, newcomer=True) is None
    assert (
        membership.find_objection("m", hello(B, run=A), RUN, present=False, newcomer=True)
        is not None
    )
    taken = membership.find_objection("n", hello(B), RUN, present=True, newcomer=True)
    assert taken is not None


def test_a_node_that_knows_less_of_the_protocol_than_a_run_needs_is_named_the_remedy() -> None:
    membership = Membership(1, {})
    old = msgspec.structs.replace(hello(A), revision=0)
    new = msgspec.structs.replace(hello(A), revision=1)
    assert membership.find_objection("n", old, RUN, present=False) is None
    refusal = membership.find_objection("n", old, RUN, present=False, needs_revision=1)
    assert refusal is not None
    assert refusal.remedy
    assert membership.find_objection("n", new, RUN, present=False, needs_revision=1) is None
