"""A watched folder brings each image file once, when it is complete, however it came there."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from edge.sources import folder as folder_source
from edge.sources.folder import Folder, Settings
from edge.sources.source_checkpoint import SourceCheckpoint
from tests.support.tiny_bundle import GREEN, RED


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
