"""Sources bring each image once, in order, over restarts and outages; one that fails does not stop the others."""

import asyncio
import contextlib
import http.server
import io
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from PIL import Image

from broker_config.broker.embedded import start_broker
from broker_config.protocol.errors import UsageError
from edge.config import line_settings
from edge.daemon import source_sink_factory
from edge.daemon.source_sink_factory import Instance
from edge.inference import image_decoding
from edge.inference.outcomes import Failure, Notice, Outcome, Verdict
from edge.inference.pipeline import Frame, Pipeline, Source
from edge.inference.served_model import load_model
from edge.sources import camera as video
from edge.sources import folder as folder_source
from edge.sources import mqtt as mqtt_source
from edge.sources import source_runner
from tests.support.ports import free_port
from tests.support.tiny_bundle import BLUE, GREEN, RED, tiny_bundle

VERDICT = Verdict(image="", label="", confidence=1, probabilities={}, bundle="", milliseconds=0, time="")


class Outbox:
    """Keeps the outcomes until somebody asks for them."""

    def __init__(self) -> None:
        self._outcomes: queue.Queue[Outcome] = queue.Queue()

    def put(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)

    async def next(self, count: int = 1) -> list[Any]:
        """The next outcomes."""
        return [await asyncio.to_thread(self._outcomes.get, timeout=20) for _ in range(count)]

    def rest(self) -> list[Any]:
        """All that have not been asked for."""
        return [self._outcomes.get_nowait() for _ in range(self._outcomes.qsize())]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(tiny_bundle(tmp_path_factory.mktemp("sources") / "bundle").folder)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(folder_source, "QUIET", 0.05)
    monkeypatch.setattr(source_runner, "FIRST", 0.05)
    monkeypatch.setattr(source_runner, "LONGEST", 0.2)


@pytest.fixture
def instance(tmp_path) -> Instance:
    return Instance("line-1", tmp_path / "state")


def opened(instance: Instance, *tables: dict[str, Any]) -> list[Source]:
    """The sources of `[[sources]]` tables in a file beside the state folder."""
    wanted = line_settings.parse({"sources": list(tables)}, instance.state.parent / "line.toml")
    return source_sink_factory.open_sources(wanted.sources, instance)


@contextlib.asynccontextmanager
async def fed(model: Any, *sources: Source) -> AsyncIterator[Outbox]:
    """A line that judges what these bring, until the block ends; then all is done."""
    outbox, stop = Outbox(), asyncio.Event()
    with contextlib.closing(Pipeline(model, outbox)) as line:
        feeding = [asyncio.create_task(source_runner.run_source(line, source, stop)) for source in sources]
        try:
            yield outbox
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(*feeding), 20)


def test_a_source_that_is_given_twice_is_refused(instance, tmp_path):
    with pytest.raises(UsageError, match="is given twice"):
        opened(instance, *[{"kind": "folder", "path": str(tmp_path)}] * 2)


# ---------------------------------------------------------------- folder


@pytest.fixture
def camera(tmp_path) -> Path:
    folder = tmp_path / "camera"
    folder.mkdir()
    return folder


FOLDER: dict[str, Any] = {"kind": "folder", "path": "camera"}


def put(folder: Path, *names: str, data: bytes = RED) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


@pytest.mark.slow
def test_a_burst_of_a_thousand_files_is_judged_in_the_order_in_which_they_were_written(model, instance, camera):
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
    monkeypatch.setattr(folder_source, "SWEEP", 0.05)
    put(camera, "a.png", "b.png")

    async def run() -> list[str]:
        async with fed(model, *opened(instance, FOLDER)) as outbox:
            found = await outbox.next(2)
            for name in ("a.png", "b.png"):
                (camera / name).rename(camera.parent / name)
            await asyncio.sleep(0.3)  # several sweeps
            for name in ("a.png", "b.png"):
                (camera.parent / name).rename(camera / name)
            put(camera, "c.png")
            found += await outbox.next()
            await asyncio.sleep(0.2)
        return [outcome.image for outcome in found + outbox.rest()]

    assert asyncio.run(run()) == ["a.png", "b.png", "c.png"]


def judged_names(model: Any, instance: Instance, table: dict[str, Any], count: int) -> list[str]:
    async def run() -> list[str]:
        async with fed(model, *opened(instance, table)) as outbox:
            found = await outbox.next(count)
        return [outcome.image for outcome in found + outbox.rest()]

    return asyncio.run(run())


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
    with pytest.raises(UsageError, match="it is on another disk"):
        opened(instance, FOLDER | {"after": f"move:{other}"})


def test_sub_folders_are_watched_when_asked_but_not_hidden_ones_nor_that_for_judged_files(model, instance, camera):
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


def test_a_folder_that_goes_is_told_once_and_taken_up_when_it_is_back(model, instance, camera, monkeypatch):
    monkeypatch.setattr(folder_source, "SWEEP", 0.05)

    async def run() -> None:
        async with fed(model, *opened(instance, FOLDER)) as outbox:
            put(camera, "a.png")
            await outbox.next()
            camera.rename(camera.parent / "away")
            [notice] = await outbox.next()
            assert isinstance(notice, Notice)
            assert "cannot look into" in notice.text
            assert (notice.kind, notice.details) == ("source", {"source": "folder " + str(camera)})
            await asyncio.sleep(0.5)  # several tries
            (camera.parent / "away").rename(camera)
            put(camera, "b.png")
            again, verdict = await outbox.next(2)
            assert again.text.endswith("brings images again")
            assert (verdict.image, outbox.rest()) == ("b.png", [])

    asyncio.run(run())


def test_a_state_folder_that_cannot_be_written_is_said_before_anything_is_judged(instance, camera):
    instance.state.parent.mkdir(exist_ok=True)
    instance.state.write_bytes(b"a file")
    with pytest.raises(Exception, match="cannot remember in"):
        opened(instance, FOLDER)


# ---------------------------------------------------------------- MQTT


@pytest.fixture
def broker(tmp_path) -> Iterator[str]:
    with start_broker(tmp_path / "broker", kind="mosquitto") as running:
        yield running.url


def publish(url: str, *messages: tuple[str, bytes], name: str = "", retain: bool = False) -> None:
    """Another program publishes; returns when the broker has all."""
    address = httpx.URL(url)
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.connect(address.host, address.port)
    client.loop_start()
    properties = Properties(PacketTypes.PUBLISH)
    if name:
        properties.UserProperty = ("name", name)
    for topic, payload in messages:
        client.publish(topic, payload, qos=1, retain=retain, properties=properties).wait_for_publish(10)
    client.disconnect()
    client.loop_stop()


def mqtt(url: str) -> dict[str, Any]:
    return {"kind": "mqtt", "url": url, "topic": "plant/+/image"}


def met(instance: Instance, url: str) -> None:
    """The source has been there before: the broker has its session."""

    async def run() -> None:
        [source] = opened(instance, mqtt(url))
        stop = asyncio.Event()
        frames = source.frames(stop)
        asyncio.get_running_loop().call_later(0.3, stop.set)
        assert [frame async for frame in frames] == []

    asyncio.run(run())


def test_images_on_a_topic_are_judged_in_order_also_those_of_the_time_when_the_line_was_away(model, instance, broker):
    async def run(*names: str) -> list[tuple[str, str, str]]:
        async with fed(model, *opened(instance, mqtt(broker))) as outbox:
            found = await outbox.next(len(names))
        return [(outcome.image, outcome.label, outcome.source) for outcome in found + outbox.rest()]

    met(instance, broker)
    for number, image in enumerate((RED, GREEN, RED)):  # the same picture twice is two parts
        publish(broker, ("plant/a/image", image), name=f"part {number}")
    publish(broker, ("plant/b/image", BLUE), ("plant/b/other", BLUE))
    source = "mqtt plant/+/image"
    assert asyncio.run(run("1", "2", "3", "4")) == [
        ("part 0", "red", source),
        ("part 1", "green", source),
        ("part 2", "red", source),
        ("plant/b/image", "blue", source),
    ]
    publish(broker, ("plant/a/image", BLUE), name="later")
    assert asyncio.run(run("1")) == [("later", "blue", source)]


def test_what_was_not_judged_comes_again_and_what_was_does_not_although_its_acknowledgement_was_lost(instance, broker):
    async def bring(count: int, judged: int) -> list[str]:
        [source] = opened(instance, mqtt(broker))
        async with contextlib.aclosing(source.frames(asyncio.Event())) as frames:
            found = [await asyncio.wait_for(anext(frames), 10) for _ in range(count)]
        for frame in found[:judged]:  # after the connection has gone
            source.done(frame, VERDICT)
        return [frame.name for frame in found]

    met(instance, broker)
    for number, image in enumerate((RED, GREEN, BLUE)):
        publish(broker, ("plant/a/image", image), name=str(number))
    assert asyncio.run(bring(3, judged=1)) == ["0", "1", "2"]
    assert asyncio.run(bring(2, judged=0)) == ["1", "2"]


def test_a_message_that_was_in_hand_at_a_crash_says_so_until_it_is_judged(instance, broker):
    async def bring(*, judged: bool) -> list[int]:
        [source] = opened(instance, mqtt(broker))
        async with contextlib.aclosing(source.frames(asyncio.Event())) as frames:
            found = [await asyncio.wait_for(anext(frames), 10) for _ in range(2)]
            for frame in found if judged else ():
                source.done(frame, VERDICT)
        return [frame.crashes for frame in found]

    met(instance, broker)
    for image in (RED, GREEN):
        publish(broker, ("plant/a/image", image))
    assert asyncio.run(bring(judged=False)) == [0, 0]
    assert asyncio.run(bring(judged=True)) == [1, 1]
    for image in (RED, GREEN):
        publish(broker, ("plant/a/image", image))
    assert asyncio.run(bring(judged=True)) == [0, 0]


def test_of_equal_images_each_counts_also_after_a_kill_between_them(instance, broker):
    async def bring(count: int, judged: int) -> int:
        [source] = opened(instance, mqtt(broker))
        async with contextlib.aclosing(source.frames(asyncio.Event())) as frames:
            found = [await asyncio.wait_for(anext(frames), 10) for _ in range(count)]
            for frame in found[:judged]:
                source.done(frame, VERDICT)
            with contextlib.suppress(TimeoutError):
                while True:
                    found.append(await asyncio.wait_for(anext(frames), 0.5))
        return len(found)

    met(instance, broker)
    publish(broker, *[("plant/a/image", RED)] * 3, name="part")
    assert asyncio.run(bring(3, judged=1)) == 3
    assert asyncio.run(bring(2, judged=2)) == 2


def test_an_image_that_the_broker_repeats_while_it_is_in_hand_is_brought_once(instance, broker):
    async def run() -> None:
        [source] = opened(instance, mqtt(broker))
        stop = asyncio.Event()
        frames = source.frames(stop)
        first = await asyncio.wait_for(anext(frames), 10)
        source._in_hand[0][0].client._paho.socket().shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        again = asyncio.create_task(anext(frames, None))
        await asyncio.wait({again}, timeout=1.5)  # meanwhile it connects again
        assert not again.done()
        source.done(first, VERDICT)
        stop.set()
        assert await again is None
        source._checkpoint.prune(0)  # type: ignore[attr-defined]

    met(instance, broker)
    publish(broker, ("plant/a/image", RED), name="part")
    asyncio.run(asyncio.wait_for(run(), 20))
    met(instance, broker)  # it was acknowledged in the connection that counts: nothing comes again


def test_the_broker_sends_no_more_than_the_window_before_the_first_is_judged(instance, broker):
    async def unjudged() -> list[Frame]:
        [source] = opened(instance, mqtt(broker))
        frames = source.frames(asyncio.Event())
        found = []
        with contextlib.suppress(TimeoutError):
            while True:
                found.append(await asyncio.wait_for(anext(frames), 0.7))
        return found

    met(instance, broker)
    publish(broker, *[("plant/a/image", RED)] * (2 * mqtt_source.WINDOW))
    assert len(asyncio.run(unjudged())) == mqtt_source.WINDOW


def test_bad_and_too_large_images_are_failures_and_retained_ones_are_left_out(model, instance, broker, monkeypatch):
    monkeypatch.setattr(mqtt_source, "MAX_BYTES", 5000)
    monkeypatch.setattr(image_decoding, "MAX_BYTES", 5000)

    async def run() -> list[Any]:
        async with fed(model, *opened(instance, mqtt(broker))) as outbox:
            await asyncio.to_thread(publish, broker, ("plant/a/image", b""), ("plant/a/image", b"x" * 9000))
            await asyncio.to_thread(publish, broker, ("plant/a/image", RED))
            found = await outbox.next(3)
        return found + outbox.rest()

    publish(broker, ("plant/a/image", BLUE), retain=True)
    met(instance, broker)
    empty, large, good = asyncio.run(run())
    assert isinstance(empty, Failure)
    assert "is empty" in empty.error
    assert "is larger than" in large.error
    assert good.label == "red"


def test_a_broker_that_is_not_there_yet_is_told_and_tried_again(model, instance, tmp_path):
    port = free_port()

    async def run() -> None:
        async with fed(model, *opened(instance, mqtt(f"mqtt://127.0.0.1:{port}"))) as outbox:
            [notice] = await outbox.next()
            assert "nothing listens" in notice.text
            with await asyncio.to_thread(start_broker, tmp_path / "broker", port=port, kind="mosquitto") as running:
                verdict = None
                while verdict is None:  # until it has subscribed
                    await asyncio.to_thread(publish, running.url, ("plant/a/image", RED))
                    verdict = next((each for each in outbox.rest() if isinstance(each, Verdict)), None)
                assert verdict.label == "red"

    asyncio.run(run())


def test_a_broker_that_says_nothing_does_not_hold_up_the_end(model, instance):
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def run() -> None:
            async with fed(model, *opened(instance, mqtt(f"mqtt://127.0.0.1:{silent.getsockname()[1]}"))):
                connection, _ = await asyncio.to_thread(silent.accept)
            connection.close()

        begun = time.monotonic()
        asyncio.run(run())
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize("topic", ["", "a/#/b", "a+/b", "a\0"])
def test_a_topic_that_cannot_be_is_refused(instance, topic):
    with pytest.raises(UsageError, match="cannot be subscribed to"):
        opened(instance, mqtt("mqtt://127.0.0.1:1") | {"topic": topic})


# ---------------------------------------------------------------- cameras and video files


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
            await asyncio.wait_for(source_runner.run_source(line, *opened(instance, filmed(film)), asyncio.Event()), 20)
        return outbox.rest()

    found = asyncio.run(run())
    assert [outcome.image for outcome in found] == [f"film.avi#{number}" for number in range(1, 13)]
    assert [outcome.label for outcome in found] == ["red"] * 6 + ["blue"] * 6


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"every": 5}, [1, 6, 11]), ({"rate": 4.0}, [1, 4, 6, 9, 11]), ({"rate": 100.0}, [*range(1, 13)])],
)
def test_only_so_many_frames_are_judged_as_asked(model, instance, film, options, expected):
    names = judged_names(model, instance, filmed(film, **options), len(expected))
    assert names == [f"film.avi#{number}" for number in expected]


def test_of_a_camera_the_newest_frames_wait_and_dropped_ones_are_counted(film):
    reader = video._Reader(video.Settings(input=str(film)), live=True, on_change=lambda: None)
    reader.start()
    reader.join(20)
    assert [frame[0] for frame in iter(reader.next, None)] == [11, 12]
    assert reader.dropped == 10
    assert reader.error == "brings no frames any more"


@contextlib.contextmanager
def network_camera() -> Iterator[str]:
    """A camera that shows a green picture over HTTP and hangs up after five frames; its address, with a password."""
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


def test_a_camera_in_the_network_that_goes_away_is_told_without_its_password_and_taken_up_again(model, instance):
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


def test_a_camera_that_is_not_there_does_not_stop_the_others(model, instance, camera):
    async def run() -> None:
        async with fed(model, *opened(instance, FOLDER, {"kind": "video", "input": 99})) as outbox:
            [notice] = await outbox.next()
            assert "video camera-99 cannot be opened" in notice.text
            put(camera, "a.png")
            [verdict] = await outbox.next()
            assert verdict.image == "a.png"

    asyncio.run(run())


def test_a_damaged_film_is_told(model, instance, tmp_path):
    (tmp_path / "film.mp4").write_bytes(b"no film")

    async def run() -> None:
        async with fed(model, *opened(instance, filmed(tmp_path / "film.mp4"))) as outbox:
            [notice] = await outbox.next()
            assert "video film.mp4 cannot be opened" in notice.text

    asyncio.run(run())


def test_a_film_that_is_not_there_and_a_missing_opencv_are_said_at_the_start(instance, tmp_path, film, monkeypatch):
    with pytest.raises(UsageError, match="there is no video"):
        opened(instance, filmed(tmp_path / "none.avi"))
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UsageError) as caught:
        opened(instance, filmed(film))
    assert "edge-node[camera]" in caught.value.remedy
