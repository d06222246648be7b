"""Cameras and video files: frames as asked for, the newest first to wait,
and what is missing or damaged.
"""

import asyncio
import contextlib
import http.server
import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from broker_config.protocol.errors import UsageError
from edge.inference.outcomes import Notice, Verdict
from edge.inference.pipeline import Pipeline
from edge.sources import camera as video
from edge.sources import source_runner
from tests.support.line_sources import Outbox, fed, judged_names, opened


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> Path:
    """12 frames at 10 a second: 6 red ones, 6 blue ones."""
    path = tmp_path_factory.mktemp("film") / "film.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 48))
    for color in [(0, 0, 255)] * 6 + [(255, 0, 0)] * 6:  # OpenCV's order: blue, green, red
        writer.write(np.full((48, 64, 3), color, np.uint8))
    writer.release()
    return path


def filmed(film: Path, **options: Any) -> dict[str, Any]:
    return {"kind": "video", "input": str(film)} | options


def test_a_film_is_judged_whole_and_then_ends_without_an_error(model, instance, film):
    async def run() -> list[Any]:
        outbox = Outbox()
        with contextlib.closing(Pipeline(model, outbox)) as line:
            await source_runner.run_source(line, *opened(instance, filmed(film)), asyncio.Event())
        return outbox.rest()

    found = asyncio.run(run())
    assert [outcome.image for outcome in found] == [f"film.avi#{number}" for number in range(1, 13)]
    assert [outcome.label for outcome in found] == ["red"] * 6 + ["blue"] * 6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 5}, [1, 6, 11]),
        ({"rate": 4.0}, [1, 4, 6, 9, 11]),
        ({"rate": 100.0}, [*range(1, 13)]),
    ],
)
def test_only_so_many_frames_are_judged_as_asked(model, instance, film, options, expected):
    names = judged_names(model, instance, filmed(film, **options), len(expected))
    assert names == [f"film.avi#{number}" for number in expected]


def test_of_a_camera_the_newest_frames_wait_and_dropped_ones_are_counted(film):
    reader = video.VideoReader(video.Settings(input=str(film)), live=True, on_change=lambda: None)
    reader.start()
    reader.join(60)
    assert [frame[0] for frame in iter(reader.next, None)] == [11, 12]
    assert reader.dropped == 10
    assert reader.error == "brings no frames any more"


@contextlib.contextmanager
def network_camera() -> Iterator[str]:
    """A camera that shows a green picture over HTTP and hangs up after five frames;
    its address, with a password.
    """
    out = io.BytesIO()
    Image.new("RGB", (64, 48), (0, 255, 0)).save(out, "JPEG")
    part = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n" % (
        len(out.getvalue()),
        out.getvalue(),
    )

    class Camera(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(part * 5)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Camera) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://viewer:secret@127.0.0.1:{server.server_port}/stream"
        server.shutdown()


def test_a_camera_in_the_network_that_goes_away_is_told_without_its_password_and_taken_up_again(
    model, instance
):
    async def run(url: str) -> list[Any]:
        async with fed(model, *opened(instance, {"kind": "video", "input": url})) as outbox:
            found: list[Any] = []
            while sum(isinstance(each, Notice) for each in found) < 3:
                found += await outbox.next()
        return found

    with network_camera() as url:
        found = asyncio.run(run(url))
    texts = [outcome.text for outcome in found if isinstance(outcome, Notice)]
    assert ["any more" in text for text in texts] == [True, False, True]
    assert "brings images again" in texts[1]
    assert {outcome.label for outcome in found if isinstance(outcome, Verdict)} == {"green"}
    assert "secret" not in str(found)


def test_a_damaged_film_is_told(model, instance, tmp_path):
    (tmp_path / "film.mp4").write_bytes(b"no film")

    async def run() -> None:
        async with fed(model, *opened(instance, filmed(tmp_path / "film.mp4"))) as outbox:
            [notice] = await outbox.next()
            assert "film.mp4 cannot be opened" in notice.text

    asyncio.run(run())


def test_a_film_that_is_not_there_and_a_missing_opencv_are_said_at_the_start(
    instance, tmp_path, film, monkeypatch
):
    with pytest.raises(UsageError, match="no video"):
        opened(instance, filmed(tmp_path / "none.avi"))
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UsageError) as caught:
        opened(instance, filmed(film))
    assert "edge-node[camera]" in caught.value.remedy
