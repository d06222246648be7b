"""The history of a run: values by round and node, in bounds,
and what is newer than what somebody has seen.
"""

import math

import pytest

from trainer.console.run_history import (
    MOST_MEASURES,
    MOST_MESSAGES,
    Description,
    Measure,
    NodeStatus,
    RunHistory,
)


@pytest.fixture
def run() -> RunHistory:
    return RunHistory(
        Description(
            id="0" * 16,
            kind="federation",
            federation="steel",
            method="fedavg",
            rounds=9,
            places=2,
            settings={},
            measures=(Measure("weight"),),
            begun=100.0,
        )
    )


def rows(run: RunHistory, since: int = 0) -> dict[int, dict[str, list[float | None]]]:
    return {row.round: row.values for row in run.since(since)["rows"]}


def test_values_stand_in_the_order_of_nodes_with_gaps_where_there_are_none(run: RunHistory) -> None:
    run.put(1, "a", {"weight": 1.0})
    run.put(2, "b", {"weight": 2.0})
    assert run.since(0)["nodes"] == ["a", "b"]
    assert rows(run) == {1: {"weight": [1.0]}, 2: {"weight": [None, 2.0]}}


def test_who_has_seen_a_version_gets_what_has_changed_since_and_no_more(run: RunHistory) -> None:
    run.put(1, "a", {"weight": 1.0})
    run.tell(101.0, "first")
    seen = run.version
    run.put(2, "a", {"weight": 2.0})
    run.tell(102.0, "second")
    newer = run.since(seen)
    assert (rows(run, seen), [each.text for each in newer["messages"]]) == (
        {2: {"weight": [2.0]}},
        ["second"],
    )
    assert not newer["whole"]
    run.put(1, "b", {"weight": 3.0})  # a late one
    assert set(rows(run, newer["version"])) == {1}
    assert run.since(run.version)["rows"] == []


@pytest.mark.parametrize("version", [-1, 0, 1_000])
def test_who_has_seen_nothing_or_another_process_s_history_gets_all_of_it(
    run: RunHistory, version: int
) -> None:
    run.put(1, "a", {"weight": 1.0})
    found = run.since(version)
    assert found["whole"]
    assert len(found["rows"]) == 1


def test_a_value_that_is_no_finite_number_is_left_out(run: RunHistory) -> None:
    run.put(1, "a", {"weight": math.nan, "loss": math.inf})
    assert rows(run) == {1: {}}


def test_names_of_measures_that_nodes_make_up_are_bounded(run: RunHistory) -> None:
    for number in range(2 * MOST_MEASURES):
        run.put(1, "a", {f"made up {number}": 1.0})
    run.put(1, "a", {"weight": 1.0})
    assert len(run.since(0)["measures"]) == MOST_MEASURES
    assert rows(run)[1]["weight"] == [1.0]


def test_messages_are_bounded_in_number_and_length(run: RunHistory) -> None:
    for _ in range(2 * MOST_MESSAGES):
        run.tell(101.0, "x" * 10_000)
    messages = run.since(0)["messages"]
    assert len(messages) == MOST_MESSAGES
    assert len(messages[0].text) == 500


def test_what_a_node_does_lasts_since_it_began_and_its_last_error_stays(run: RunHistory) -> None:
    run.set_status("a", "absent", 101.0, "its connection ended")
    run.set_status("a", "training", 102.0)
    run.set_status("a", "training", 103.0)
    assert run.since(0)["status"] == [NodeStatus("training", 102.0, "its connection ended")]


def test_the_first_time_counts_by_which_a_node_had_done_something(run: RunHistory) -> None:
    run.row(1, opened=100.0)
    run.elapsed(1, "a", "counted", 130.0)
    run.elapsed(1, "a", "counted", 190.0)
    run.elapsed(7, "a", "counted", 190.0)  # of a round that is not known
    assert rows(run) == {1: {"counted": [30.0]}}
