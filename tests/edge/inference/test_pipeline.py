"""The line itself: how many decoded frames may wait."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from edge.inference import pipeline as pipeline_module
from edge.inference.image_decoding import ImageError, Photo
from edge.inference.outcomes import Failure, Verdict
from edge.inference.pipeline import Frame, Inspection, NullConsumer, Pipeline
from edge.inference.served_model import load_model
from edge.sources.source_runner import run_source
from tests.support.hostile_images import many_segments
from tests.support.tiny_bundle import BLUE, RED, tiny_bundle
from tests.support.waiting import PATIENCE


def test_frames_wait_as_files_and_only_a_few_are_decoded_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, cut = threading.Semaphore(0), pipeline_module.cut_tiles

    def counted(*arguments: object) -> object:
        decoded.release()
        return cut(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline_module, "cut_tiles", counted)

    async def crowd(line: Pipeline) -> int:
        judged = asyncio.gather(*(line.classify(Frame(str(number), RED)) for number in range(20)))
        busy, go_on = threading.Event(), threading.Event()
        line.monitors = (lambda seen: (busy.set(), go_on.wait(60), seen.verdict)[-1],)
        await asyncio.to_thread(busy.wait, 60)
        for _ in range(3):
            await asyncio.to_thread(decoded.acquire)
        # they meet when all that they were given is done
        all_decoders = threading.Barrier(pipeline_module._DECODERS)
        await asyncio.gather(
            *(line.run_in_decoder(all_decoders.wait, PATIENCE) for _ in range(all_decoders.parties))
        )
        ahead = 3
        while decoded.acquire(blocking=False):
            ahead += 1
        go_on.set()
        await judged
        return ahead

    with contextlib.closing(
        Pipeline(load_model(tiny_bundle(tmp_path / "bundle").folder), NullConsumer())
    ) as line:
        assert asyncio.run(crowd(line)) == 3


def test_a_frame_for_which_memory_lacks_is_a_failure_and_the_line_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    with contextlib.closing(
        Pipeline(load_model(tiny_bundle(tmp_path / "bundle").folder), NullConsumer())
    ) as line:
        with monkeypatch.context() as patch:
            patch.setattr(pipeline_module, "cut_tiles", exhausted)
            failure = asyncio.run(line.classify(Frame("part-7", RED)))
        assert isinstance(failure, Failure)
        assert "MemoryError()" in failure.error
        assert not isinstance(asyncio.run(line.classify(Frame("part-8", RED))), Failure)


class Many:
    """A source of many frames."""

    def __init__(self, name: str, frames: int) -> None:
        self.name, self._frames = name, frames
        self.images: list[str] = []

    async def frames(self, stop: asyncio.Event) -> AsyncGenerator[Frame]:
        for number in range(self._frames):
            if not stop.is_set():
                yield Frame(f"{self.name}-{number}", RED, self.name)

    def done(self, frame: Frame, outcome: Verdict | Failure) -> None:
        self.images.append(outcome.image)


def test_frames_of_all_sources_together_find_room_for_a_few_and_each_source_is_judged_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, judged, most, cut = (
        itertools.count(1),
        itertools.count(1),
        [0],
        pipeline_module.cut_tiles,
    )
    ahead = {"cut": 0, "judged": 0}

    def counted(*arguments: object) -> object:
        ahead["cut"] = next(decoded)
        most[0] = max(most[0], ahead["cut"] - ahead["judged"])
        return cut(*arguments)  # type: ignore[arg-type]

    def slowly(seen: Inspection) -> Verdict:
        time.sleep(0.002)  # decoders, if they could, would be far ahead
        ahead["judged"] = next(judged)
        return seen.verdict

    async def feed_all(line: Pipeline, sources: list[Many]) -> None:
        await asyncio.gather(*(run_source(line, each, asyncio.Event()) for each in sources))

    monkeypatch.setattr(pipeline_module, "cut_tiles", counted)
    sources = [Many(str(number), 20) for number in range(8)]
    with contextlib.closing(
        Pipeline(
            load_model(tiny_bundle(tmp_path / "bundle").folder), NullConsumer(), None, [slowly]
        )
    ) as line:
        asyncio.run(feed_all(line, sources))
    assert most[0] <= 3
    for source in sources:
        assert source.images == [f"{source.name}-{number}" for number in range(20)]


def test_nobody_waits_for_images_that_take_long_but_others_of_that_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of them at once; ordinary frames are judged before the first of them is given up."""
    others_are_judged, read = threading.Event(), pipeline_module.read_image

    def read_late(data: bytes, name: str, seconds: float) -> Photo:
        if seconds:  # in which it may be decoded, for it is one that can take long
            others_are_judged.wait(PATIENCE)
        return read(data, name, seconds)

    monkeypatch.setattr(pipeline_module, "DECODING", 0.3)
    monkeypatch.setattr(pipeline_module, "read_image", read_late)

    async def crowd(line: Pipeline) -> None:
        hostile = many_segments()
        slow = [
            asyncio.create_task(line.classify(Frame(f"slow-{number}", hostile)))
            for number in range(4)
        ]
        pixels = asyncio.create_task(line.decode(hostile, 16, "image 0"))
        for number in range(20):
            assert isinstance(await line.classify(Frame(f"part-{number}", BLUE)), Verdict)
        assert not any(each.done() for each in slow)
        others_are_judged.set()
        for failure in await asyncio.gather(*slow):
            assert isinstance(failure, Failure)
            assert f"{failure.image} takes more than 0.3 s to decode" in failure.error
        with pytest.raises(ImageError, match="image 0 takes more than"):
            await pixels
        assert line.inspected == 24

    with contextlib.closing(
        Pipeline(load_model(tiny_bundle(tmp_path / "bundle").folder), NullConsumer())
    ) as line:
        asyncio.run(crowd(line))
