"""A watched folder brings each image file once, when it is complete, however it came there."""

import asyncio
import contextlib
import json
import time
from pathlib import Path

import psutil
import pytest

from edge.sources import folder as folder_source
from edge.sources.folder import Folder, Settings, source_name
from edge.sources.source_checkpoint import SourceCheckpoint
from tests.support.daemon_process import daemon
from tests.support.tiny_bundle import GREEN, RED, tiny_bundle


@pytest.fixture
def watched(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_source, "QUIET", 0.05)
    folder = tmp_path / "watched"
    folder.mkdir()
    return folder


async def brought(folder: Path, *steps: object) -> list[str]:
    """The names that a Folder brings: `steps` are counts of names to wait for, and actions to take then."""
    stop = asyncio.Event()
    found = []
    source = Folder(Settings(path=str(folder)), SourceCheckpoint(folder.parent / "state", str(folder)))
    async with contextlib.aclosing(source.frames(stop)) as images:
        for step in steps:
            if callable(step):
                step()
            else:
                found += [(await anext(images)).name for _ in range(int(str(step)))]
        stop.set()
        found += [image.name async for image in images]
    return found


def test_files_renamed_into_place_or_changed_later_are_brought(watched):
    (watched / "a.png.part").write_bytes(RED)

    def rename() -> None:
        (watched / "a.png.part").rename(watched / "a.png")

    def change() -> None:
        (watched / "a.png").write_bytes(GREEN + b" ")

    assert asyncio.run(brought(watched, rename, 1, change, 1)) == ["a.png", "a.png"]


def test_a_file_is_brought_once_however_often_the_folder_is_swept(watched, monkeypatch):
    monkeypatch.setattr(folder_source, "SWEEP", 0.0)
    (watched / "a.png").write_bytes(RED)

    def add() -> None:
        (watched / "b.png").write_bytes(GREEN)

    assert asyncio.run(brought(watched, 1, add, 1)) == ["a.png", "b.png"]


def test_only_image_files_directly_in_the_folder_are_brought_oldest_first(watched):
    (watched / "sub.png").mkdir()
    for name in ("sub.png/c.png", ".hidden.png", "notes.txt", "d.JPG", "b.png", "a.png"):
        (watched / name).write_bytes(RED)
    assert asyncio.run(brought(watched, 3)) == ["d.JPG", "b.png", "a.png"]


def test_files_that_nobody_announces_are_found_by_sweeping(watched, monkeypatch):
    monkeypatch.setattr(folder_source, "SWEEP", 0.2)
    share = watched / "share"
    share.mkdir()
    moved = watched / "out-of-reach"

    def replace() -> None:  # as when a network share goes and comes: the kernel watches the folder that is gone
        share.rename(moved)
        share.mkdir()
        (share / "a.png").write_bytes(RED)

    assert asyncio.run(brought(share, replace, 1)) == ["a.png"]


@pytest.mark.slow
@pytest.mark.parametrize("inspected", [True, False])
def test_of_a_hundred_thousand_files_the_next_is_judged_within_seconds_and_in_little_memory(
    inspected: bool, tmp_path: Path
) -> None:
    """A new one where all have been inspected; else the first of them."""
    folder, verdicts = tmp_path / "watched", tmp_path / "verdicts.jsonl"
    folder.mkdir()
    checkpoint = SourceCheckpoint(tmp_path / "state", source_name(Settings(path=str(folder))))
    for number in range(100_000):
        path = folder / f"{number}.png"
        path.write_bytes(RED)
        if inspected:
            checkpoint.put(path.name.encode(), b"%d %d" % (path.stat().st_mtime_ns, len(RED)))
    with daemon(tiny_bundle(tmp_path / "bundle").folder, watch=str(folder), output=str(verdicts)) as line:
        began = time.monotonic()
        if inspected:
            (folder / "new.png").write_bytes(RED)
        while not (verdicts.exists() and verdicts.read_bytes()):
            assert time.monotonic() - began < 40  # a tenth of that on a machine of its own
            time.sleep(0.1)
        assert psutil.Process(line.process.pid).memory_info().rss < 400 << 20
        assert line.end()[0] == 0
    [first, *others] = [json.loads(text)["image"] for text in verdicts.read_text().splitlines()]
    assert [first, *others] == ["new.png"] if inspected else first == "0.png"
