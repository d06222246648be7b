"""A log whose every change is noticed, and that several processes may append to."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from broker_config.storage.checked_log import CheckedLog
from broker_config.storage.checksums import DamagedError

STRINGS = msgspec.json.Decoder(str)
ENTRIES = ["pause", "drop plant-a", "resume", "abort ü"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of ENTRIES."""
    found = tmp_path / "actions.jsonl"
    log = CheckedLog(found, STRINGS)
    for entry in ENTRIES:
        log.append(entry)
    return found


def read(path: Path) -> list[str]:
    return CheckedLog(path, STRINGS).read()


def test_each_entry_is_read_once_and_in_order_also_by_who_writes(path: Path) -> None:
    reader, writer = CheckedLog(path, STRINGS), CheckedLog(path, STRINGS)
    assert reader.read() == ENTRIES
    assert reader.read() == []
    assert writer.append("more") == ENTRIES
    assert reader.append("most") == ["more"]
    assert writer.read() == ["most"]


def test_each_flipped_bit_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for position in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedError):
            read(path)


@pytest.mark.parametrize("kept", range(len(ENTRIES)))
def test_a_log_that_was_cut_between_two_lines_is_noticed(path: Path, kept: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
    with pytest.raises(DamagedError):
        read(path)
    with pytest.raises(DamagedError):
        CheckedLog(path, STRINGS).append("more")


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [*lines, b"\n"],
    ],
)
def test_exchanged_missing_and_repeated_lines_are_noticed(
    path: Path, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(DamagedError):
        read(path)


def test_a_log_that_is_gone_is_noticed_by_new_and_by_old_readers(path: Path) -> None:
    reader = CheckedLog(path, STRINGS)
    reader.read()
    path.unlink()
    for each in (reader, CheckedLog(path, STRINGS)):
        with pytest.raises(DamagedError):
            each.read()


def test_a_log_that_never_was_is_empty(tmp_path: Path) -> None:
    assert read(tmp_path / "none.jsonl") == []


def test_half_a_line_of_a_power_cut_is_no_entry_and_makes_room_for_the_next(path: Path) -> None:
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for half in (last[: len(last) // 2], bytes(100)):
        path.write_bytes(whole + half)
        assert read(path) == ENTRIES
    CheckedLog(path, STRINGS).append("more")
    assert read(path) == [*ENTRIES, "more"]


def test_a_kill_before_the_number_of_lines_was_noted_is_no_damage(path: Path) -> None:
    newest = path.with_name(f"{path.name}.newest")
    before = newest.read_bytes()
    CheckedLog(path, STRINGS).append("more")
    for content in (before, b"", before[:-3]):
        newest.write_bytes(content)
        assert read(path) == [*ENTRIES, "more"]
    newest.unlink()
    assert read(path) == [*ENTRIES, "more"]


def test_those_who_append_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ThreadPoolExecutor(8) as threads:
        numbers = [str(number) for number in range(64)]
        appended = [threads.submit(CheckedLog(path, STRINGS).append, each) for each in numbers]
        for each in appended:
            each.result()
    assert sorted(read(path)) == sorted(numbers)


def test_what_the_disk_does_not_take_has_not_happened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CheckedLog(path, STRINGS)

    def fail(_: int) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space"):
            log.append("lost")
    assert read(path) == ENTRIES
    log.append("kept")
    assert read(path) == [*ENTRIES, "kept"]


def test_a_pipe_is_an_error_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    log = CheckedLog(tmp_path / "log.jsonl", STRINGS)
    with pytest.raises(OSError, match="pipe"):
        log.read()
    with pytest.raises(OSError, match="pipe"):
        log.append("more")
