"""The store of finished cells, under kills, several writers, damage and git merges."""

import subprocess
from pathlib import Path

import pytest

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import Training
from research.afedcl.cell import Cell, Finished, NodeResult, Setting
from research.runner.store import Records
from tests.support.forked_process import CONTEXT


def finished(seed: int, seconds: float = 1.0) -> Finished:
    cell = Cell(
        setting=Setting(dataset="NEU-CLS", images="0" * 64, partition="disjoint"),
        method="fedavg",
        options={"epochs": 6},
        model="small",
        weights="1" * 64,
        size=32,
        training=Training(),
        rounds=2,
        seed=seed,
        torch="2.13.0",
    )
    node = NodeResult(
        name="a", trained={"x": 5}, tested=9, accuracy=0.5, f1=0.5, history={"L_C": [0.1, None]}
    )
    return Finished(key=cell.key, cell=cell, nodes=[node], seconds=seconds, machine="here")


def store(folder: Path) -> Records[Finished]:
    return Records(folder / "cells.jsonl", Finished)


def keys(records: Records[Finished]) -> set[str]:
    return {each.key for each in records}


def test_what_is_added_is_found_by_anybody_who_looks(tmp_path: Path) -> None:
    first, second = finished(0), finished(1)
    store(tmp_path / "s").add(first)
    store(tmp_path / "s").add(second)
    assert list(store(tmp_path / "s")) == [first, second]


def test_a_key_is_that_of_the_cell_alone() -> None:
    assert finished(0, seconds=9).key == finished(0).key != finished(1).key


def test_nothing_is_found_where_nothing_was_added(tmp_path: Path) -> None:
    assert list(store(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("lost", [1, 20, 200])
def test_a_line_that_a_kill_has_torn_is_as_if_it_had_never_been(lost: int, tmp_path: Path) -> None:
    records, path = store(tmp_path), tmp_path / "cells.jsonl"
    for seed in (0, 1):
        records.add(finished(seed))
    path.write_bytes(path.read_bytes()[:-lost])
    assert keys(records) == {finished(0).key}
    records.add(finished(2))
    assert keys(records) == {finished(0).key, finished(2).key}
    assert path.read_bytes().count(b"\n") == 2


def add(folder: Path, first: int) -> None:
    """A hundred cells, one by one."""
    for seed in range(first, first + 100):
        store(folder).add(finished(seed))


@pytest.mark.slow
def test_several_processes_may_add_at_once(tmp_path: Path) -> None:
    processes = [CONTEXT.Process(target=add, args=(tmp_path, first)) for first in (0, 100, 200)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert keys(store(tmp_path)) == {finished(seed).key for seed in range(300)}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    store(tmp_path).add(finished(0))
    with (tmp_path / "cells.jsonl").open("ab") as file:
        file.write(b"<<<<<<< HEAD\n")
    with pytest.raises(UsageError, match=r"cells\.jsonl.*line 2"):
        list(store(tmp_path))


def test_git_merges_what_two_machines_have_added(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    git("init", "-b", "main")
    store(tmp_path).add(finished(0))
    git("add", ".")
    git("commit", "-m", "one")
    git("checkout", "-b", "other")
    store(tmp_path).add(finished(1))
    git("commit", "-am", "two")
    git("checkout", "main")
    store(tmp_path).add(finished(2))
    git("commit", "-am", "three")
    git("merge", "other")
    assert keys(store(tmp_path)) == {finished(seed).key for seed in range(3)}


def test_a_disk_that_takes_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EdgeNodeError, match="cannot be a folder"):
        store(tmp_path / "file").add(finished(0))
