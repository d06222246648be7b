"""Files, databases, folders: each outcome once, whoever is killed."""

import contextlib
import csv
import errno
import json
import os
import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest

from broker_config.protocol.errors import EdgeNodeError
from edge.inference.outcomes import Failure, Notice
from edge.sinks.csv import COLUMNS, Csv
from edge.sinks.folder import Folder
from edge.sinks.jsonl import JsonLines
from edge.sinks.sink import Item, SinkDown
from edge.sinks.sqlite import Sqlite
from tests.support.numbered_outcomes import OutcomeProcess, item, items, numbers, verdict
from tests.support.waiting import wait_until

FAILURE = Failure(
    image="a,\n=b",
    error="it is empty",
    remedy="look",
    time="2026-03-01T09:30:00.125+00:00",
    id="f" * 32,
)
NOTICE = Notice(
    kind="drift", text="the images have changed", time="2026-03-01T09:30:01.125+00:00", id="e" * 32
)


def is_ours(seq: int, id_: str) -> bool:
    return True


# ---------------------------------------------------------------- files to which lines are appended


def json_images(path: Path) -> list[int]:
    return numbers([json.loads(line) for line in path.read_text().splitlines()])


def csv_images(path: Path) -> list[int]:
    with path.open(newline="") as file:
        return numbers([row | {"seq": int(row["seq"])} for row in csv.DictReader(file)])


def database_images(path: Path) -> list[int]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return numbers(
            [
                dict(zip(("seq", "image"), row, strict=True))
                for row in db.execute("SELECT seq, image FROM outcomes ORDER BY rowid")
            ]
        )


def folder_images(path: Path) -> list[int]:
    return numbers(
        [
            json.loads(file.read_text())
            for file in sorted(path.glob("*/*.json"), key=lambda file: file.name)
        ]
    )


@pytest.mark.slow
def test_a_daemon_that_is_killed_again_and_again_writes_every_outcome_once_into_every_file(
    tmp_path,
):
    readers = {
        "jsonl": json_images,
        "csv": csv_images,
        "sqlite": database_images,
        "folder": folder_images,
    }
    sinks = [{"kind": kind, "path": str(tmp_path / f"verdicts.{kind}")} for kind in readers]
    put = []
    for start in range(3):
        put += (
            OutcomeProcess(sinks, tmp_path / "state", first=1000 * start, count=1000, pause=0.01)
            .until(50 * start + 60)
            .kill()
        )
    OutcomeProcess(sinks, tmp_path / "state", first=9999, count=1).until().end()
    for kind, read in readers.items():
        found = read(tmp_path / f"verdicts.{kind}")
        assert found == sorted(set(found)), kind
        assert {*put, 9999} <= set(found), kind


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_half_a_line_is_cut_off_and_what_the_file_has_is_not_written_again(kind, tmp_path):
    path = tmp_path / "verdicts"
    sink = kind(path, is_ours)
    sink.deliver(items(100, 105))
    sink.close()
    whole = path.read_bytes()
    for cut in (1, 7, 30, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        again = kind(path, is_ours)
        again.deliver([item(104, verdict(104)), item(105, verdict(105)), item(106, verdict(106))])
        again.close()
        found = path.read_bytes()
        assert found.startswith(whole[: whole[:-cut].rindex(b"\n") + 1])
        assert (json_images if kind is JsonLines else csv_images)(path) == list(range(100, 107))


@pytest.mark.parametrize("kind", [JsonLines, Csv])
@pytest.mark.parametrize(
    "before", [b'{"earlier": true}\n', b"seq 1\nno end of line", b"\n", b"\xff\xfe\n"]
)
def test_what_others_have_written_into_the_file_stays(kind, before, tmp_path):
    path = tmp_path / "verdicts"
    path.write_bytes(before)
    sink = kind(path, is_ours)
    sink.deliver(items(1, 2))
    sink.close()
    assert path.read_bytes().startswith(before)
    assert path.read_bytes().count(b"\n") == 1 + before.rstrip(b"\n").count(b"\n") + 2


def test_a_line_of_another_outbox_is_no_reason_to_leave_outcomes_out(tmp_path):
    path = tmp_path / "verdicts"
    JsonLines(path, is_ours).deliver(items(5000, 5001))
    JsonLines(path, lambda seq, id_: False).deliver(items(1, 2))
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [5000, 5001, 1, 2]


def test_a_file_that_was_rotated_is_begun_anew(tmp_path):
    path = tmp_path / "verdicts"
    sink = Csv(path, is_ours)
    sink.deliver(items(1, 2))
    path.rename(tmp_path / "verdicts.1")
    sink.deliver(items(3, 4))
    assert csv_images(tmp_path / "verdicts.1") == [1, 2]
    assert csv_images(path) == [3, 4]


def test_a_row_of_the_csv_file_is_a_line_whatever_names_hold(tmp_path):
    untaught = msgspec.structs.replace(verdict(4), taught=False)
    Csv(tmp_path / "verdicts.csv", is_ours).deliver(
        [item(1, FAILURE), item(2, NOTICE), item(3), item(4, untaught)]
    )
    with (tmp_path / "verdicts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len((tmp_path / "verdicts.csv").read_text().splitlines()) == 5
    assert tuple(rows[0]) == COLUMNS
    assert [row["type"] for row in rows] == ["Failure", "Notice", "Verdict", "Verdict"]
    assert [row["taught"] for row in rows] == ["", "", "1", "0"]
    assert rows[0]["image"] == "a,\N{REPLACEMENT CHARACTER}=b"
    assert rows[0]["text"] == "it is empty; look"
    assert rows[1]["text"] == "drift: the images have changed"
    assert (rows[2]["label"], rows[2]["defect"], rows[2]["doubts"]) == ("inclusion", "1", "")


def test_a_full_disk_makes_it_wait(tmp_path):
    with pytest.raises(SinkDown, match="No space left"):
        JsonLines(Path("/dev/full"), is_ours).deliver(items(1, 1))


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_what_could_not_be_brought_to_the_disk_stands_there_once(kind, tmp_path, monkeypatch):
    path = tmp_path / "verdicts"
    sink = kind(path, is_ours)
    sink.deliver(items(1, 2))

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fails)
        with pytest.raises(SinkDown, match="Input/output"):
            sink.deliver(items(3, 5))
        patched.setattr(os, "ftruncate", fails)
        with pytest.raises(SinkDown, match="Input/output"):
            sink.deliver(items(3, 5))
    sink.deliver(items(3, 6))
    assert (json_images if kind is JsonLines else csv_images)(path) == list(range(1, 7))


@pytest.mark.parametrize(
    "open_",
    [
        lambda path: JsonLines(path, is_ours),
        lambda path: Csv(path, is_ours),
        Sqlite,
        lambda path: Folder(path, 9, is_ours),
    ],
)
def test_a_place_where_nothing_can_be_written_is_named_at_once(open_, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EdgeNodeError, match=r"cannot (write|be a folder)") as refused:
        open_(tmp_path / "file" / "verdicts")
    assert refused.value.remedy


# ---------------------------------------------------------------- SQLite, a folder


def test_the_database_has_a_row_for_each_outcome_once(tmp_path):
    sink = Sqlite(tmp_path / "verdicts.db")
    batch = [item(1), item(2, FAILURE), item(3, NOTICE)]
    sink.deliver(batch)
    sink.deliver(batch)
    with contextlib.closing(sqlite3.connect(tmp_path / "verdicts.db")) as db:
        rows = db.execute("SELECT seq, type, label, json FROM outcomes").fetchall()
    assert [row[:3] for row in rows] == [
        (1, "Verdict", "inclusion"),
        (2, "Failure", None),
        (3, "Notice", None),
    ]
    assert json.loads(rows[1][3])["error"] == "it is empty"
    sink.close()


def test_a_database_that_was_moved_away_or_deleted_is_begun_anew(tmp_path):
    path = tmp_path / "verdicts.db"
    sink = Sqlite(path)
    sink.deliver(items(1, 2))
    path.rename(tmp_path / "moved.db")
    sink.deliver(items(3, 4))
    assert database_images(tmp_path / "moved.db") == [1, 2]
    assert database_images(path) == [3, 4]
    for file in tmp_path.glob("verdicts.db*"):
        file.unlink()
    path.mkdir()
    for _ in range(2):
        with pytest.raises(SinkDown):
            sink.deliver(items(5, 5))
    path.rmdir()
    sink.deliver(items(5, 6))
    sink.close()
    assert database_images(path) == [5, 6]


@pytest.mark.slow
def test_files_that_are_taken_away_do_not_come_again_after_kills(tmp_path):
    folder, ended, taken = tmp_path / "out", threading.Event(), []

    def take() -> None:
        while not ended.wait(0.002):
            for file in folder.glob("*/*.json"):
                taken.append(int(json.loads(file.read_text())["image"]))
                file.unlink()

    reader = threading.Thread(target=take, daemon=True)  # a test that fails is not to wait for it
    reader.start()
    sinks = [{"kind": "folder", "path": str(folder)}]
    put = []
    for start in range(4):
        process = OutcomeProcess(sinks, tmp_path / "state", first=1000 * start, count=400).until()
        wanted = len(taken) + 70 + 37 * start
        wait_until(lambda wanted=wanted: len(taken) >= wanted)
        put += process.kill()
    last = OutcomeProcess(sinks, tmp_path / "state", first=9999, count=1).until()
    # the newest: what a busy machine has not delivered by the end would wait on disk
    wait_until(lambda: 9999 in taken)
    last.end()
    ended.set()
    reader.join()
    found = sorted(
        [*taken, *(int(json.loads(file.read_text())["image"]) for file in folder.glob("*/*.json"))]
    )
    assert found == sorted({*put, 9999})


@pytest.mark.parametrize("renamed", [False, True])
def test_a_kill_between_writing_and_naming_a_file_loses_none_and_gives_none_twice(
    renamed, tmp_path
):
    last = item(3)
    Folder(tmp_path, 9, is_ours).deliver([*items(1, 2), last])
    file = next(tmp_path.glob("*/3-*"))
    if renamed:
        file.unlink()  # somebody has taken it away
    else:
        file.rename(file.with_suffix(".tmp"))
    Folder(tmp_path, 9, is_ours).deliver([last, item(4)])
    assert sorted(path.name[:1] for path in tmp_path.glob("*/*.json")) == (
        ["1", "2", "4"] if renamed else list("1234")
    )


def test_the_folder_has_a_file_for_each_outcome_by_label_and_not_more_than_it_may(tmp_path):
    sink = Folder(tmp_path, 4, is_ours)
    odd = msgspec.structs.replace(verdict(0), label="../up")
    sink.deliver([*items(1, 3), item(4, FAILURE), item(5, odd)])
    names = sorted(path.parent.name for path in tmp_path.glob("*/*"))
    assert names == ["-.-up", "_failure", "inclusion", "scratches"]
    again = Folder(tmp_path, 4, is_ours)  # after a restart it still knows which is the oldest
    again.deliver([item(6)])
    assert sorted(int(path.name.partition("-")[0]) for path in tmp_path.glob("*/*")) == [3, 4, 5, 6]


def test_what_others_name_is_no_formula_in_a_spreadsheet(tmp_path):
    sink = Csv(tmp_path / "verdicts.csv", lambda *_: True)
    sink.deliver(
        [
            Item(
                1,
                msgspec.structs.replace(verdict(1), image="=HYPERLINK(0)", label="@defect"),
                replayed=False,
            )
        ]
    )
    sink.close()
    with (tmp_path / "verdicts.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["image"], row["label"]) == ("'=HYPERLINK(0)", "'@defect")
