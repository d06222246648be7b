"""A coordinator's state folder as the console reads it: of any age, in use, damaged,
and without disturbing it.
"""

import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from broker_config.protocol.errors import EdgeNodeError, UsageError
from tests.support.recorded_run import RUN, record_run
from trainer.console.federation_folder import FederationFolder
from trainer.console.run_history import RunHistory
from trainer.federation.server.journal import Journal
from trainer.progress import (
    Gathering,
    NodeJoined,
    NodeLost,
    NodeRefused,
    Paused,
    RoundOpened,
    event_log,
)

OTHER = "f" * 16


def read(folder: Path) -> FederationFolder:
    found = FederationFolder(folder)
    found.refresh()
    return found


def value(run: RunHistory, round_: int, key: str, node: str) -> float | None:
    found = run.since(0)
    (row,) = (row for row in found["rows"] if row.round == round_)
    return row.values[key][found["nodes"].index(node)]


def test_a_finished_run_has_facts_of_its_journal_and_measurements_of_its_log(
    tmp_path: Path,
) -> None:
    names = record_run(tmp_path)
    run = read(tmp_path).runs[RUN]
    found = run.since(0)
    assert found["nodes"] == names
    assert (found["stage"], found["round"], len(found["rows"])) == ("finished", 5, 5)
    assert {status.doing for status in found["status"]} == {"finished"}
    assert value(run, 5, "bytes", "plant-2") == 9_000_000
    assert value(run, 1, "weight", "plant-1") == pytest.approx(value(run, 1, "L_D", "plant-1"))
    assert value(run, 3, "offered", "plant-1") == pytest.approx(30, abs=0.01)
    assert value(run, 3, "counted", "plant-1") == pytest.approx(40, abs=0.01)
    assert found["rows"][0].whole == {
        "seconds": 55.0,
        "bytes_up": 27_000_000,
        "bytes_down": 9_000_000,
    }
    assert "round 3: plant-3 contributed too late; it is not counted" in [
        each.text for each in found["messages"]
    ]


def test_an_open_round_shows_who_has_contributed_and_what_the_others_do(tmp_path: Path) -> None:
    record_run(tmp_path, contributed=2)
    run = read(tmp_path).runs[RUN]
    assert (run.stage, run.newest) == ("open", 5)
    assert run.since(0)["rows"][-1].closed is None
    assert len(run.since(0)["rows"][-1].values["weight"]) == 2


def test_since_when_a_node_has_no_part_in_a_round_is_told_until_it_comes_back(
    tmp_path: Path,
) -> None:
    record_run(tmp_path, contributed=1)
    opened = read(tmp_path).runs[RUN].since(0)["rows"][-1].opened
    with (tmp_path / event_log.FILE).open("ab") as log:
        for seconds, event in (
            (20, NodeLost(node="plant-2", round=5)),
            (30, NodeRefused(node="plant-3", round=5, reason="dropped")),
        ):
            log.write(msgspec.json.encode(event_log.Logged(opened + seconds, event)) + b"\n")
    found = read(tmp_path)
    assert value(found.runs[RUN], 5, "absent", "plant-2") == pytest.approx(20, abs=0.1)
    assert value(found.runs[RUN], 5, "refused", "plant-3") == pytest.approx(30, abs=0.1)
    with event_log.logging(tmp_path, lambda _: None) as report:
        report(NodeJoined(node="plant-2"))
    found.refresh()
    assert value(found.runs[RUN], 5, "absent", "plant-2") is None
    assert value(found.runs[RUN], 5, "refused", "plant-3") is not None


def test_without_a_log_as_earlier_versions_left_none_there_are_the_journal_s_facts(
    tmp_path: Path,
) -> None:
    record_run(tmp_path)
    (tmp_path / event_log.FILE).unlink()
    run = read(tmp_path).runs[RUN]
    assert value(run, 5, "weight", "plant-3") is not None
    assert set(run.since(0)["rows"][0].values) == {"weight", "bytes"}


def test_all_runs_of_a_folder_are_told_apart(tmp_path: Path) -> None:
    record_run(tmp_path, OTHER, nodes=2, method="fedavg")
    record_run(tmp_path, contributed=1)
    runs = read(tmp_path).runs
    assert [*runs] == [OTHER, RUN]
    assert [len(run.nodes) for run in runs.values()] == [2, 3]
    assert "L_D" in [measure.key for measure in runs[RUN].about.measures]
    assert "L_D" not in [measure.key for measure in runs[OTHER].about.measures]


def test_what_is_added_is_seen_with_the_next_look_and_only_then(tmp_path: Path) -> None:
    record_run(tmp_path, contributed=2)
    folder = read(tmp_path)
    seen = folder.runs[RUN].version
    assert not folder.refresh()
    journal = Journal(tmp_path)
    journal.add_contribution(RUN, 5, "plant-3", 0.5, None)
    assert folder.refresh()
    journal.conclude(RUN, Journal.latest(journal).broadcast)  # type: ignore[union-attr]
    journal.close()
    assert folder.refresh()
    newer = folder.runs[RUN].since(seen)
    assert [row.round for row in newer["rows"]] == [5]
    assert newer["stage"] == "finished"


def test_events_change_what_is_known_of_nodes_and_of_the_run(tmp_path: Path) -> None:
    record_run(tmp_path, contributed=2)
    folder = read(tmp_path)
    run = folder.runs[RUN]
    with event_log.logging(tmp_path, lambda _: None) as report:
        report(NodeRefused(node="plant-2", round=5, reason="its weight is no number"))
        report(Paused(round=5, waiting_for=["plant-3"]))
    folder.refresh()
    assert (run.paused, run.status["plant-2"].doing) == (True, "refused")
    assert run.since(0)["messages"][-2].kind == "error"
    with event_log.logging(tmp_path, lambda _: None) as report:
        report(NodeRefused(node="</script>", round=5, reason="no node can have this name"))
        report(Gathering(federation="steel", run=RUN, nodes=3, rounds=5))
        report(RoundOpened(round=5))
    folder.refresh()
    assert "</script>" not in run.status
    # until it says again that it is there
    assert (run.paused, run.status["plant-1"].doing) == (False, "absent")


def test_the_coordinator_commits_while_it_is_read_and_the_other_way_round(tmp_path: Path) -> None:
    record_run(tmp_path, contributed=1)
    folder, journal = read(tmp_path), Journal(tmp_path)
    for number in range(50):
        journal.add_contribution(RUN, 5, f"late-{number}", 0.5, None)
        assert folder.refresh()
    journal.close()
    assert len(folder.runs[RUN].nodes) == 53


def test_a_copy_that_may_not_be_written_is_read_too(tmp_path: Path) -> None:
    record_run(tmp_path / "own")
    shutil.copytree(tmp_path / "own", tmp_path / "copy")
    for path in (tmp_path / "copy").iterdir():
        path.chmod(0o400)
    (tmp_path / "copy").chmod(0o500)
    assert read(tmp_path / "copy").runs[RUN].newest == 5
    (tmp_path / "copy").chmod(0o700)


def test_a_folder_without_a_journal_or_with_a_damaged_one_is_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="no journal"):
        FederationFolder(tmp_path)
    record_run(tmp_path)
    with sqlite3.connect(tmp_path / Journal.FILE) as database:
        database.execute("UPDATE contributions SET weight = 9")
    with pytest.raises(EdgeNodeError, match="damaged"):
        FederationFolder(tmp_path)
