"""A watched folder brings each image file once, when it is complete, in order, over restarts."""

import asyncio
import contextlib
import io
import json
import os
from pathlib import Path

import pytest
from PIL import Image

from broker_config.protocol.errors import UsageError
from edge.inference.image_decoding import annotated_tags
from edge.inference.outcomes import Verdict
from edge.sources import folder as folder_source
from edge.sources.folder import Folder, Settings, source_name
from edge.sources.source_checkpoint import SourceCheckpoint
from tests.support.daemon_process import daemon
from tests.support.line_sources import FOLDER, fed, judged_names, opened, put
from tests.support.tiny_bundle import GREEN, RED, tiny_bundle
from tests.support.waiting import wait_until, wait_until_async

VERDICT = Verdict(
    image="", label="", confidence=1, probabilities={}, bundle="", milliseconds=0, time=""
)


@pytest.fixture
def watched(tmp_path):
    folder = tmp_path / "watched"
    folder.mkdir()
    return folder


async def brought(folder: Path, *steps: object) -> list[str]:
    """The names that a Folder brings: `steps` are counts of names to wait for,
    and actions to take then.
    """
    stop = asyncio.Event()
    found = []
    source = Folder(
        Settings(path=str(folder)), SourceCheckpoint(folder.parent / "state", str(folder))
    )
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


def test_images_of_kinds_that_cannot_be_read_are_told_once(watched, monkeypatch, caplog):
    monkeypatch.setattr(folder_source, "SWEEP", 0.0)
    for name in ("a.heic", "b.HEIC", "c.gif", "d.txt", "e.png.part"):
        (watched / name).write_bytes(RED)

    def add() -> None:
        (watched / "f.heic").write_bytes(RED)
        (watched / "g.png").write_bytes(RED)

    assert asyncio.run(brought(watched, add, 1)) == ["g.png"]
    told = [each.getMessage() for each in caplog.records if "ignored" in each.getMessage()]
    assert len(told) == 2
    assert ".heic" in "".join(told)
    assert ".gif" in "".join(told)


def test_annotated_pictures_are_told_and_left_where_they_are(watched, caplog):
    drawn = io.BytesIO()
    Image.new("RGB", (16, 16)).save(drawn, "JPEG", exif=annotated_tags())
    for name, data in (("a.jpg", drawn.getvalue()), ("b.annotated.jpg", RED), ("c.png", RED)):
        (watched / name).write_bytes(data)
        os.utime(watched / name, (1, 1))
    assert asyncio.run(brought(watched, 1)) == ["c.png"]
    assert "2 annotated picture(s) are left out" in caplog.text


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

    # as when a network share goes and comes: the kernel watches the folder that is gone
    def replace() -> None:
        share.rename(moved)
        share.mkdir()
        (share / "a.png").write_bytes(RED)

    assert asyncio.run(brought(share, replace, 1)) == ["a.png"]


@pytest.mark.slow
@pytest.mark.parametrize("inspected", [True, False])
def test_of_a_hundred_thousand_files_the_next_is_judged(inspected: bool, tmp_path: Path) -> None:
    """A new one where all have been inspected; else the first of them."""
    folder, verdicts = tmp_path / "watched", tmp_path / "verdicts.jsonl"
    folder.mkdir()
    checkpoint = SourceCheckpoint(tmp_path / "state", source_name(Settings(path=str(folder))))
    contents = [tmp_path / "even.png", tmp_path / "odd.png"]  # ext4 allows a file 65,000 names
    for content in contents:
        content.write_bytes(RED)
    for number in range(100_000):
        path = folder / f"{number}.png"
        path.hardlink_to(contents[number % 2])  # names are quick to make, and to delete afterwards
        if inspected:
            checkpoint.put(path.name.encode(), b"%d %d" % (path.stat().st_mtime_ns, len(RED)))
    with daemon(
        tiny_bundle(tmp_path / "bundle").folder, watch=str(folder), output=str(verdicts)
    ) as line:
        if inspected:
            (folder / "new.png").write_bytes(RED)
        # some seconds on a machine of its own
        wait_until(lambda: verdicts.exists() and verdicts.read_bytes())
        assert line.end()[0] == 0
    [first, *others] = [json.loads(text)["image"] for text in verdicts.read_text().splitlines()]
    assert [first, *others] == ["new.png"] if inspected else first == "0.png"


# In a line


@pytest.mark.slow
def test_a_burst_of_a_thousand_files_is_judged_in_the_order_in_which_they_were_written(
    model, instance, camera
):
    names = [f"{number:04}.bmp" for number in range(1000)]

    async def run() -> list[str]:
        async with fed(model, *opened(instance, FOLDER)) as outbox:
            await asyncio.to_thread(put, camera, *names)
            return [outcome.image for outcome in await outbox.next(1000)] + outbox.rest()

    assert asyncio.run(run()) == names


def test_over_restarts_amid_a_burst_every_file_is_judged_and_none_twice(model, instance, camera):
    names = [f"{number:03}.png" for number in range(300)]
    put(camera, *names)

    async def run(least: int) -> list[str]:
        async with fed(model, *opened(instance, FOLDER)) as outbox:
            found = await outbox.next(least)
        return [outcome.image for outcome in found + outbox.rest()]

    first, second = asyncio.run(run(40)), asyncio.run(run(40))
    third = asyncio.run(run(300 - len(first) - len(second)))
    assert len(first) < 300
    assert first + second + third == names


def test_a_file_that_was_brought_but_not_judged_comes_again_after_a_restart(instance, camera):
    put(camera, "a.png", "b.png", "c.png")

    async def bring(count: int, judged: int) -> list[str]:
        [source] = opened(instance, FOLDER)
        async with contextlib.aclosing(source.frames(asyncio.Event())) as frames:
            found = [await anext(frames) for _ in range(count)]
        for frame in found[:judged]:
            source.done(frame, VERDICT)
        return [frame.name for frame in found]

    assert asyncio.run(bring(3, judged=1)) == ["a.png", "b.png", "c.png"]
    assert asyncio.run(bring(2, judged=2)) == ["b.png", "c.png"]


def test_a_file_that_changed_while_the_line_was_away_is_judged_again(model, instance, camera):
    async def run() -> list[str]:
        async with fed(model, *opened(instance, FOLDER)) as outbox:
            [found] = await outbox.next()
        return [outcome.label for outcome in [found, *outbox.rest()]]

    put(camera, "a.png")
    assert asyncio.run(run()) == ["red"]
    put(camera, "a.png", data=GREEN + b" ")
    assert asyncio.run(run()) == ["green"]


def test_an_empty_folder_may_be_a_share_that_is_not_mounted_so_nothing_is_forgotten(
    model, instance, camera, monkeypatch
):
    sweeps, iterdir = [], Path.iterdir
    monkeypatch.setattr(folder_source, "SWEEP", 0.05)
    monkeypatch.setattr(Path, "iterdir", lambda folder: sweeps.append(folder) or iterdir(folder))
    put(camera, "a.png", "b.png")

    async def run() -> list[str]:
        async with fed(model, *opened(instance, FOLDER)) as outbox:
            found = await outbox.next(2)
            for name in ("a.png", "b.png"):
                (camera / name).rename(camera.parent / name)
            several = len(sweeps) + 3
            await wait_until_async(lambda: len(sweeps) >= several)
            for name in ("a.png", "b.png"):
                (camera.parent / name).rename(camera / name)
            for name in ("c.png", "d.png"):
                put(camera, name)
                found += await outbox.next()
        return [outcome.image for outcome in found + outbox.rest()]

    assert asyncio.run(run()) == ["a.png", "b.png", "c.png", "d.png"]


def test_judged_files_are_deleted_or_moved_whole_to_where_no_name_is_taken(model, instance, camera):
    put(camera, "a.png", "b.png")
    put(camera, "seen/a.png", data=b"earlier")
    assert judged_names(model, instance, FOLDER | {"after": "move:seen"}, 2) == ["a.png", "b.png"]
    assert not list(camera.glob("*.png"))
    assert {path.name: path.read_bytes() for path in (camera / "seen").iterdir()} == {
        "a.png": b"earlier",
        "a-1.png": RED,
        "b.png": RED,
    }
    put(camera, "c.png", "bad.png", data=b"no image")
    judged_names(model, instance, FOLDER | {"after": "delete"}, 2)
    assert not list(camera.glob("*.png"))


def test_the_next_free_name_is_found_with_few_looks_however_many_are_taken(camera, monkeypatch):
    put(camera, "part.png", *(f"part-{number}.png" for number in range(1, 700)))
    looks: list[Path] = []
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: looks.append(path) or exists(path))
    assert folder_source._free(camera / "part.png") == camera / "part-700.png"
    assert len(looks) < 30


def test_what_was_judged_just_before_a_kill_is_put_away_at_the_next_start(model, instance, camera):
    put(camera, "a.png")
    judged_names(model, instance, FOLDER, 1)
    table = FOLDER | {"after": "delete"}
    opened(instance, table)  # for trial: a reload may be refused yet
    assert list(camera.iterdir())
    put(camera, "b.png")
    assert judged_names(model, instance, table, 1) == ["b.png"]
    assert not list(camera.iterdir())


def test_files_cannot_be_moved_to_another_disk(instance, camera, tmp_path):
    other = Path("/dev/shm")  # noqa: S108
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one disk only")
    with pytest.raises(UsageError, match="another disk"):
        opened(instance, FOLDER | {"after": f"move:{other}"})


def test_sub_folders_are_watched_when_asked_but_not_hidden_ones_nor_that_for_judged_files(
    model, instance, camera
):
    put(camera, "a.png", "press/b.png", ".hidden/c.png", "seen/d.png")
    table = FOLDER | {"recursive": True, "after": "move:seen"}
    assert sorted(judged_names(model, instance, table, 2)) == ["a.png", "press/b.png"]


def test_a_name_that_is_no_utf_8_is_judged_and_told(model, instance, camera):
    async def run() -> list[str]:
        async with fed(model, *opened(instance, FOLDER)) as outbox:
            put(camera, "a.png", os.fsdecode(b"part\xff.png"))
            found = await outbox.next(2)
            put(camera, "b.png")
            found += await outbox.next()
        return [outcome.image for outcome in found + outbox.rest()]

    assert asyncio.run(run()) == ["a.png", "part\N{REPLACEMENT CHARACTER}.png", "b.png"]
    put(camera, "c.png")
    assert judged_names(model, instance, FOLDER, 1) == ["c.png"]  # and it is remembered


def test_a_state_folder_that_cannot_be_written_is_said_before_anything_is_judged(instance, camera):
    instance.state.parent.mkdir(exist_ok=True)
    instance.state.write_bytes(b"a file")
    with pytest.raises(Exception, match="cannot remember in"):
        opened(instance, FOLDER)
