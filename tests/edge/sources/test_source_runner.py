"""A source that fails is told once and taken up again, and does not stop the others."""

import asyncio

import pytest

from broker_config.protocol.errors import UsageError
from edge.inference.outcomes import Notice
from edge.sources import folder as folder_source
from edge.sources import source_runner
from tests.support.line_sources import FOLDER, fed, opened, put
from tests.support.waiting import wait_until_async


def test_a_source_that_is_given_twice_is_refused(instance, tmp_path):
    with pytest.raises(UsageError, match="twice"):
        opened(instance, *[{"kind": "folder", "path": str(tmp_path)}] * 2)


def test_a_folder_that_goes_is_told_once_and_taken_up_when_it_is_back(
    model, instance, camera, monkeypatch
):
    monkeypatch.setattr(folder_source, "SWEEP", 0.05)
    monkeypatch.setattr(source_runner, "FIRST", 0.02)
    tries, frames = [], folder_source.Folder.frames
    monkeypatch.setattr(
        folder_source.Folder, "frames", lambda *given: tries.append(None) or frames(*given)
    )

    async def run() -> None:
        async with fed(model, *opened(instance, FOLDER)) as outbox:
            put(camera, "a.png")
            await outbox.next()
            camera.rename(camera.parent / "away")
            [notice] = await outbox.next()
            assert isinstance(notice, Notice)
            assert "cannot look into" in notice.text
            assert (notice.kind, notice.details) == ("source", {"source": "folder " + str(camera)})
            await wait_until_async(lambda: len(tries) >= 5)
            (camera.parent / "away").rename(camera)
            put(camera, "b.png")
            again, verdict = await outbox.next(2)
            assert again.text.endswith("brings images again")
            assert (verdict.image, outbox.rest()) == ("b.png", [])

    asyncio.run(run())


def test_a_camera_that_is_not_there_does_not_stop_the_others(model, instance, camera):
    async def run() -> None:
        async with fed(model, *opened(instance, FOLDER, {"kind": "video", "input": 99})) as outbox:
            [notice] = await outbox.next()
            assert "video camera-99 cannot be opened" in notice.text
            put(camera, "a.png")
            [verdict] = await outbox.next()
            assert verdict.image == "a.png"

    asyncio.run(run())
