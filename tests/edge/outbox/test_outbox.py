"""The outbox: what was put is kept, in order and in bounds,
whatever happens to the process and to the disk.
"""

import contextlib
import itertools
import json
import logging
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.inference.outcomes import Notice, Outcome
from edge.outbox.limits import Limits
from edge.outbox.outbox import Outbox, open_outbox
from tests.support.numbered_outcomes import OutcomeProcess, verdict
from tests.support.waiting import wait_until

NOWHERE = {"kind": "webhook", "url": "http://127.0.0.1:1/"}  # nobody listens there


@contextlib.contextmanager
def begun(folder: Path, *names: str, **limits: int):
    with open_outbox(folder, Limits(**limits)) as outbox:
        outbox.set_sinks(names or ("a",))
        yield outbox


def images(outbox: Outbox, name: str = "a", most: int = 10_000) -> list[str]:
    outcomes = [msgspec.json.decode(data, type=Outcome) for _, data in outbox.read(name, most)]
    return [outcome.kind if isinstance(outcome, Notice) else outcome.image for outcome in outcomes]


def test_each_sink_gets_everything_in_order_at_its_own_pace(tmp_path):
    with begun(tmp_path, "a", "b") as outbox:
        first = outbox.newest + 1
        for number in range(10):
            outbox.put(verdict(number))
        assert [seq for seq, _ in outbox.read("a", 100)] == list(range(first, first + 10))
        outbox.advance("a", first + 6)
        assert images(outbox, "a") == ["7", "8", "9"]
        assert images(outbox, "b", most=2) == ["0", "1"]
        assert (outbox.pending("a"), outbox.pending("b")) == (3, 10)


def test_what_was_not_delivered_comes_after_the_next_start_and_what_was_delivered_does_not(
    tmp_path,
):
    with begun(tmp_path, "a", "b") as outbox:
        for number in range(10):
            outbox.put(verdict(number))
        outbox.advance("a", outbox.newest - 2)
        outbox.advance("b", outbox.newest)
        last = outbox.newest
    with begun(tmp_path, "a", "b") as outbox:
        assert images(outbox, "a") == ["8", "9"]
        assert images(outbox, "b") == []
        outbox.put(verdict(10))
        assert outbox.newest == last + 1
        assert outbox.pending("a") == 3


def test_a_new_sink_begins_at_the_present_and_one_that_is_gone_keeps_nothing_waiting(tmp_path):
    with begun(tmp_path, "a", "gone") as outbox:
        outbox.put(verdict(1))
        outbox.advance("a", outbox.newest)
    with begun(tmp_path, "a", "new") as outbox:
        outbox.put(verdict(2))
        assert images(outbox, "new") == ["2"]
        outbox.advance("a", outbox.newest)
        outbox.advance("new", outbox.newest)
    assert rows(tmp_path) == 0


def rows(folder: Path) -> int:
    """How many outcomes are on disk."""
    with contextlib.closing(sqlite3.connect(folder / "outcomes.sqlite")) as db:
        return db.execute("SELECT COUNT(*) FROM outcomes").fetchone()[0]


def test_a_kill_loses_nothing_that_was_put(tmp_path):
    put = OutcomeProcess([NOWHERE], tmp_path, count=100_000).until(400).kill()
    with begun(tmp_path / "spool" / "line-1", "webhook:http://127.0.0.1:1/") as outbox:
        found = [
            int(image) for image in images(outbox, "webhook:http://127.0.0.1:1/", most=100_000)
        ]
    assert found == list(range(len(found)))
    assert put == found[: len(put)]
    assert len(put) >= 400


def test_putting_does_not_wait_for_the_disk(tmp_path):
    with begun(tmp_path) as outbox:
        modes = {
            name: outbox._db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "wal_autocheckpoint")
        }
    # SQLite syncs its write-ahead log only when it copies that to the database, which the
    # maintenance thread does.
    assert modes == {"journal_mode": "wal", "synchronous": 1, "wal_autocheckpoint": 0}


def test_a_sink_that_waits_is_woken_by_the_next_outcome_and_by_the_end(tmp_path):
    closing = threading.Event()
    with begun(tmp_path) as outbox:
        threading.Timer(0.05, outbox.put, [verdict(0)]).start()
        assert outbox.wait("a", 1000, closing)
        outbox.advance("a", outbox.newest)
        threading.Timer(0.05, lambda: (closing.set(), outbox.wake())).start()
        assert not outbox.wait("a", 1000, closing)


def test_a_name_that_is_no_text_is_no_reason_to_fail(tmp_path):
    with begun(tmp_path) as outbox:
        outbox.put(msgspec.structs.replace(verdict(0), image="part\udcff.png"))
        assert images(outbox) == ["part?.png"]


def test_two_daemons_cannot_share_an_outbox(tmp_path):
    with (
        begun(tmp_path),
        pytest.raises(UsageError, match="--line"),
        begun(tmp_path),
    ):
        pass


# ---------------------------------------------------------------- in bounds


@pytest.mark.parametrize("limits", [{"outcomes": 500}, {"megabytes": 1}])
def test_too_much_drops_the_oldest_and_says_so_once(limits, tmp_path, caplog):
    filler, numbers, said = (
        {"scratches" * 20: 1.0},
        itertools.count(),
        "the oldest outcomes are dropped",
    )
    with begun(tmp_path, **limits) as outbox:

        def put(count: int) -> int:
            for number in itertools.islice(numbers, count):
                outbox.put(msgspec.structs.replace(verdict(number), probabilities=filler))
            return number + 1

        while said not in caplog.text:  # what comes long after the notice would displace that too
            put(50)
            time.sleep(0.01)  # in which the outbox writes
        total = put(100)
    assert caplog.text.count(said) == 1
    assert (tmp_path / "outcomes.sqlite").stat().st_size < 20e6
    with begun(tmp_path, **limits) as outbox:
        left = images(outbox)
        assert left.count("spool") == 1  # the notice
        kept = [int(image) for image in left if image != "spool"]
        assert kept == list(range(total - len(kept), total))
        assert 100 < len(kept) <= 4000
        outbox.advance("a", outbox.newest)
    assert rows(tmp_path) == 0


FULL = """
import json, logging, resource, sys, threading, time
from pathlib import Path
from edge.outbox.limits import Limits
from edge.outbox.outbox import open_outbox
from tests.support.numbered_outcomes import verdict
logging.basicConfig(format="%(message)s")
folder = Path(sys.argv[1])
with open_outbox(folder, Limits()) as outbox:
    outbox.set_sinks(["a", "b"])
    def images(name):
        found = [json.loads(data) for _, data in outbox.read(name, 100_000)]
        return [each["image"] for each in found if "image" in each]  # else a notice
    for number in range(100):
        outbox.put(verdict(number))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))  # nor may what it has be written again
    attempts = []  # of the thread that writes what waits
    def note(sql):
        if threading.current_thread() is not threading.main_thread() and sql.startswith("INSERT"):
            attempts.append(sql)
    outbox._db.set_trace_callback(note)
    for number in range(100, 12_000):
        if number in (8000, 10_500, 11_500):  # before and after the first are dropped
            enough = len(attempts) + 2
            while len(attempts) < enough:
                time.sleep(0.01)
        outbox.put(verdict(number))
    found = {"full": images("a")}
    last = next(seq for seq, data in outbox.read("a", 100_000) if b'"image":"10999"' in data)
    outbox.advance("a", last)  # delivery goes on meanwhile
    found["delivered"] = images("a")
    resource.setrlimit(resource.RLIMIT_FSIZE, most)
    outbox.put(verdict(12_000))
    found["meanwhile"] = images("a")
    while outbox._failing:
        time.sleep(0.01)
    found["again"] = images("a")
    found["b"] = images("b")
print(json.dumps(found))
"""


def test_while_the_disk_is_full_outcomes_wait_in_memory_and_then_go_to_disk(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    numbers = {when: [int(image) for image in images] for when, images in found.items()}
    # before it: what had a place on disk
    gap = next(n for n, number in enumerate(numbers["full"]) if n != number)
    assert 99 <= gap < 1000
    assert numbers["full"] == [*range(gap), *range(12_000 - len(numbers["full"]) + gap, 12_000)]
    assert 9_990 <= len(numbers["full"]) - gap <= 10_000
    assert numbers["delivered"] == list(range(11_000, 12_000))
    assert numbers["meanwhile"] == list(range(11_000, 12_001))
    assert numbers["again"] == list(range(11_000, 12_001))
    assert numbers["b"][:gap] == list(range(gap))
    assert numbers["b"][-9_000:] == list(range(3_001, 12_001))
    assert (
        ended.stderr.count("cannot be written") == ended.stderr.count("can be written again") == 1
    )
    assert ended.stderr.count("the oldest outcomes are dropped") == 1


# ---------------------------------------------------------------- numbers


def test_numbers_are_never_used_twice_also_when_the_outbox_was_deleted_or_the_power_failed(
    tmp_path, monkeypatch
):
    with begun(tmp_path) as outbox:
        outbox.put(verdict(0))
        before = outbox.newest
    with contextlib.closing(sqlite3.connect(tmp_path / "outcomes.sqlite")) as db, db:
        # not closed in order, and the machine has started since
        db.execute("UPDATE facts SET place = 'another'")
    with begun(tmp_path) as outbox:
        outbox.put(verdict(1))
        after = outbox.newest
        assert images(outbox) == ["0", "1"]
    assert after > before + 1
    (tmp_path / "outcomes.sqlite").unlink()
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    with begun(tmp_path) as outbox:
        assert outbox.newest > after


def test_it_knows_which_outcomes_are_its_own(tmp_path):
    with begun(tmp_path) as outbox:
        outcome = verdict(0)
        outbox.put(outcome)
        assert outbox.contains(outbox.newest, outcome.id)
        assert not outbox.contains(outbox.newest, verdict(0).id)
        assert not outbox.contains(outbox.newest + 1, outcome.id)
        assert not outbox.contains(0, "")


def test_a_damaged_outbox_is_set_aside_and_the_line_starts(tmp_path, caplog):
    with begun(tmp_path) as outbox:
        outbox.put(verdict(0))
    (tmp_path / "outcomes.sqlite").write_bytes(b"no database at all" * 1000)
    with begun(tmp_path) as outbox, caplog.at_level(logging.ERROR):
        outbox.put(verdict(1))
        assert images(outbox) == ["1"]
    assert "is damaged" in caplog.text
    assert len(list(tmp_path.glob("damaged-*.sqlite"))) == 1


# ---------------------------------------------------------------- kills, locks, clocks

KILLED = """
import os, sys
from pathlib import Path
from edge.outbox.limits import Limits
from edge.outbox.outbox import open_outbox
with open_outbox(Path(sys.argv[1]), Limits()) as outbox:
    outbox._db.set_trace_callback(lambda sql: "INSERT INTO cursors" in sql and os._exit(9))
    outbox.set_sinks(["a"])
"""


def test_a_kill_while_the_sinks_are_named_loses_no_backlog(tmp_path):
    with begun(tmp_path) as outbox:
        for number in range(100):
            outbox.put(verdict(number))
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == 9
    with begun(tmp_path) as outbox:
        assert outbox.pending("a") == 100


def test_what_waits_for_a_sink_that_is_taken_out_is_dropped_with_a_word(tmp_path, caplog):
    with begun(tmp_path, "a", "gone") as outbox:
        outbox.put(verdict(1))
        outbox.put(verdict(2))
    with begun(tmp_path, "a"):
        assert "2 outcome(s) that waited for gone" in caplog.text


def test_another_process_that_locks_the_file_does_not_hold_up_the_line_and_nothing_is_lost(
    tmp_path, caplog
):
    with begun(tmp_path) as outbox:
        outbox.put(verdict(0))
        other = sqlite3.connect(outbox.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        tried = []
        outbox._db.set_trace_callback(
            lambda sql: tried.append((threading.current_thread(), sql[:6]))
        )
        for number in range(1, 200):
            outbox.put(verdict(number))
        outbox._db.set_trace_callback(None)
        # the first waits for the lock
        assert tried.count((threading.current_thread(), "INSERT")) == 1
        assert "database is locked" in caplog.text
        other.execute("ROLLBACK")
        wait_until(lambda: not outbox._failing)
        outbox.put(verdict(200))
        assert [int(image) for image in images(outbox)] == list(range(201))
        assert not outbox._buffer
        other.execute("BEGIN IMMEDIATE")
        outbox.put(verdict(201))
        other.execute("ROLLBACK")  # the end comes before the next attempt
    assert rows(tmp_path) == 202
    other.close()


def test_after_a_power_cut_numbers_leap_also_when_the_clock_starts_in_1970_and_nothing_was_put(
    tmp_path, monkeypatch
):
    with begun(tmp_path) as outbox:
        outbox.put(verdict(0))
        before = outbox.newest
    with contextlib.closing(sqlite3.connect(tmp_path / "outcomes.sqlite")) as db, db:
        db.execute("UPDATE facts SET place = 'another'")
    monkeypatch.setattr(time, "time", lambda: 60.0)
    with begun(tmp_path) as outbox:
        after = outbox.newest
    assert after >= before + 20_000  # what was put in the last seconds may be known to receivers
    with begun(tmp_path) as outbox:
        assert outbox.newest == after


def test_numbers_that_are_none_do_not_make_an_outcome_unreadable(tmp_path):
    nan, inf = float("nan"), float("inf")
    with begun(tmp_path) as outbox:
        outbox.put(msgspec.structs.replace(verdict(0), confidence=nan, image="part\udcff.png"))
        outbox.put(msgspec.structs.replace(verdict(1), novelty=nan))
        outbox.put(
            Notice(
                kind="drift", text="changed", time="", details={"p": nan, "distance": inf, "n": 3.0}
            )
        )
        failure, doubtful, notice = (
            msgspec.json.decode(data, type=Outcome) for _, data in outbox.read("a", 9)
        )
    assert (failure.image, failure.error) == (
        "part?.png",
        "the verdict holds a number that is not finite",
    )
    assert (doubtful.image, doubtful.novelty) == ("1", None)
    assert notice.details == {"p": "nan", "distance": "inf", "n": 3.0}


def test_a_disk_that_is_full_at_the_start_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 0)
    )
    (tmp_path / "outcomes.sqlite").mkdir()  # stands in for what SQLite cannot open
    with pytest.raises(EdgeNodeError, match="No space left") as refused, begun(tmp_path):
        pass
    assert "free some space" in refused.value.remedy


def test_an_outbox_that_was_removed_while_it_is_used_says_so_once_and_delivers_on(tmp_path, caplog):
    with begun(tmp_path) as outbox:
        for path in tmp_path.iterdir():
            path.unlink()
        wait_until(lambda: "is gone" in caplog.text)
        outbox.put(verdict(0))
        assert images(outbox) == ["0"]
    assert caplog.text.count("outcomes.sqlite is gone") == 1


def copied(folder, copy):
    """A copy of an outbox's folder, as a backup takes it."""
    shutil.copytree(folder, copy)
    return copy


def test_an_outbox_that_was_restored_from_a_copy_uses_no_number_twice(tmp_path):
    """Closed in order and in use: in neither can what came after the copy be known from the
    copy.
    """
    for closed in (True, False):
        folder = tmp_path / f"{closed}"
        with begun(folder) as outbox:
            outbox.put(verdict(0))
            copy = None if closed else copied(folder, tmp_path / f"{closed}-copy")
        copy = copy or copied(folder, tmp_path / f"{closed}-copy")
        with begun(folder) as outbox:
            for number in range(1, 13):
                outbox.put(verdict(number))
            last = outbox.newest
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        with begun(folder) as outbox:
            outbox.put(verdict(1))
            assert outbox.newest > last
            assert images(outbox) == ["0", "1"]


def test_a_damaged_outbox_gives_what_can_be_read_of_it_to_all_sinks(tmp_path, caplog):
    with begun(tmp_path) as outbox:
        for number in range(40):
            outbox.put(verdict(number))
        outbox.advance("a", outbox.newest - 10)
    path = tmp_path / "outcomes.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE cursors SET seq = seq + 5 WHERE name = 'a'")  # as a flipped bit does
        db.execute(
            "UPDATE outcomes SET data = X'7B7D' WHERE seq = (SELECT MAX(seq) - 3 FROM outcomes)"
        )
    with begun(tmp_path) as outbox:
        assert (
            len(images(outbox)) == rows(tmp_path) == rows_of(*tmp_path.glob("damaged-*.sqlite")) - 1
        )
    assert "checksum of a cursor" in caplog.text


def rows_of(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT COUNT(*) FROM outcomes").fetchone()[0]


def test_a_write_ahead_log_that_was_cut_is_told_and_its_numbers_are_not_used_again(
    tmp_path, caplog
):
    with begun(tmp_path / "live") as outbox:
        for number in range(9):
            outbox.put(verdict(number))
        last = outbox.newest
        shutil.copytree(tmp_path / "live", tmp_path / "killed")
    (tmp_path / "killed" / "outcomes.sqlite-wal").write_bytes(b"")
    with begun(tmp_path / "killed") as outbox:
        assert outbox.newest > last
    assert f"before {last}, the last that was put into it: it is damaged" in caplog.text
