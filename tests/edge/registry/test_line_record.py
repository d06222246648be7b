"""The record of a line: each event once, in order and for ever, whatever is killed,
lost or restored in between.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker_config.storage import checksums
from broker_config.storage.hash_chain import ChainError, follow
from edge.bundle.bundle_format import read_digest
from edge.registry import line_record
from edge.registry.bundle_store import _HISTORY, BundleStore
from tests.support.bundle_stores import stored, tiny


def entries(store: BundleStore) -> list[dict[str, str]]:
    """All of them, once they are known to follow one another."""
    return [entry for entry, _ in follow(line_record.read(store.folder, store.state().history))]


def copied(store: BundleStore) -> int:
    path = store.folder / line_record.FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_it_says_what_happened_to_which_bundle_and_what_was_served_from_then_on(
    tmp_path: Path,
) -> None:
    store, (one, two) = stored(tmp_path / "line-1", tiny(tmp_path / "1"), tiny(tmp_path / "2", 2))
    store.record_activation(two, "mia", "on purpose")
    store.record_rollback("the line", "too slow", failed=True)
    made = [
        (each["what"], each["bundle"], each.get("serving", ""), each["by"])
        for each in entries(store)
    ]
    assert made == [
        ("added", one, "", "test"),
        ("added", two, "", "test"),
        ("activated", one, one, "test"),
        ("activated", two, two, "mia"),
        ("rolled back", two, one, "the line"),
    ]
    assert [each["sha256"] for each in entries(store)][:2] == [
        read_digest(store.path(each)) for each in (one, two)
    ]
    assert copied(store) == 5
    assert store.head is not None
    assert store.head.entries == 5


def test_it_forgets_nothing_that_the_state_forgets(tmp_path: Path) -> None:
    store, (one,) = stored(tmp_path / "line-1", tiny(tmp_path / "1"))
    for number in range(_HISTORY + 5):
        store.record_refusal(one, "mia", str(number))
    assert [each.get("why") for each in entries(store)[2:]] == [
        str(number) for number in range(_HISTORY + 5)
    ]
    assert len(store.state().history) == _HISTORY


KILLED = """
import os, sys
from pathlib import Path
from edge.registry import line_record
from edge.registry.bundle_store import BundleStore

def die(*_):
    os.kill(os.getpid(), 9)
def write_half(descriptor, sync=os.fsync):
    sync(descriptor)
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith(line_record.FILE):
        os.truncate(descriptor, os.fstat(descriptor).st_size - 20)
        die()
store, step = BundleStore(Path(sys.argv[1])), sys.argv[2]
store.record_refusal("0" * 12, "me", "before")
if step == "before the copy":
    line_record.copy = die
else:
    line_record.os.fsync = write_half
store.record_refusal("0" * 12, "me", "killed")
"""


@pytest.mark.parametrize("step", ["before the copy", "within the copy"])
def test_a_kill_between_an_event_and_its_copy_loses_and_doubles_nothing(
    tmp_path: Path, step: str
) -> None:
    store, _ = stored(tmp_path / "line-1", tiny(tmp_path / "1"))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, store.folder, step], check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert (store.state().history[-1].why, copied(store)) == ("killed", 3)
    before = entries(store)
    assert [each["why"] for each in before[-2:]] == ["before", "killed"]
    store.record_refusal("0" * 12, "me", "after")
    assert entries(store)[:-1] == before
    assert copied(store) == 5
    assert entries(store)[-1]["why"] == "after"


def test_a_state_that_was_lost_or_restored_from_an_older_copy_changes_no_entry(
    tmp_path: Path,
) -> None:
    store, (one,) = stored(tmp_path / "line-1", tiny(tmp_path / "1"))
    path = store.folder / "state.json"
    older = path.read_bytes()
    store.record_refusal(one, "mia", "newer than the copy")
    before = entries(store)
    path.write_bytes(older)
    store.record_refusal(one, "mia", "after the copy was restored")
    assert entries(store)[:-1] == before
    path.unlink()
    store.record_activation(one, "mia", "after the state was lost")
    assert [each["why"] for each in entries(store)[2:]] == [
        "newer than the copy",
        "after the copy was restored",
        "after the state was lost",
    ]


def test_a_file_that_was_cut_or_lost_is_made_whole_from_the_state(tmp_path: Path) -> None:
    store, (one,) = stored(tmp_path / "line-1", tiny(tmp_path / "1"))
    store.record_refusal(one, "mia", "x")
    path = store.folder / line_record.FILE
    whole = path.read_bytes()
    for left in (whole[: len(whole) // 2], whole[:-1], b""):
        path.write_bytes(left)
        assert len(entries(store)) == 3
    path.unlink()
    store.record_refusal(one, "mia", "y")
    assert path.read_bytes().startswith(whole)
    assert len(entries(store)) == 4


def test_a_file_that_does_not_fit_stops_no_line_and_is_told_until_it_is_moved_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, (one,) = stored(tmp_path / "line-1", tiny(tmp_path / "1"))
    path = store.folder / line_record.FILE
    content = path.read_bytes()
    for forged in (content.replace(b"test", b"mist"), content + b"garbage\n", bytes(2 << 20)):
        path.write_bytes(forged)
        store.record_refusal(one, "mia", "x")
        assert "the record" in caplog.text
        assert path.read_bytes() == forged
        caplog.clear()
    path.write_bytes(content + b"garbage\n")
    with pytest.raises(ChainError):
        entries(store)
    shutil.move(path, tmp_path / "kept")
    store.record_refusal(one, "mia", "y")
    assert caplog.text == ""
    assert len(entries(store)) == 6


def test_events_of_an_earlier_version_stay_outside(tmp_path: Path) -> None:
    store, (one,) = stored(tmp_path / "line-1", tiny(tmp_path / "1"))
    state = json.loads((store.folder / "state.json").read_bytes())["value"]
    known = ("what", "bundle", "time", "by", "why")
    state["history"] = [{name: event[name] for name in known} for event in state["history"]]
    (store.folder / line_record.FILE).unlink()
    checksums.write_record(store.folder / "state.json", state)
    assert store.head is None
    store.record_refusal(one, "mia", "x")
    assert [each["number"] for each in entries(store)] == [1]
