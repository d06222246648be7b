"""A service manager hears from the line's daemon how it is: over a real socket,
from a real process.
"""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.config.instance import Instance
from edge.daemon.dispatcher import Dispatcher
from edge.daemon.sd_notify import ServiceManager, run_watchdog
from edge.inference.pipeline import Frame, Pipeline
from edge.inference.predictor import Outputs, Predictor
from edge.inference.served_model import load_model
from edge.inference.tiling import View
from edge.outbox.limits import Limits
from tests.support.classified_images import Told
from tests.support.daemon_process import Daemon, daemon
from tests.support.plants import start
from tests.support.tiny_bundle import RED, tiny_bundle
from tests.support.waiting import PATIENCE, wait_until


class Ear:
    """What a service manager hears."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.settimeout(PATIENCE)

    def hear(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.socket.recv(4096).decode().splitlines())

    def miss_pings(self, line: Daemon, count: int) -> None:
        """Return when the line has told its log so often that it does not ping."""
        assert line.process.stderr
        for _ in range(count):
            assert "does not answer" in line.process.stderr.readline()

    def hear_until(self, name: str) -> list[dict[str, str]]:
        """All that is said until a variable is among it."""
        heard = [self.hear()]
        while name not in heard[-1]:
            heard.append(self.hear())
        return heard


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        str(tmp_path / "notify") if request.param == "path" else f"@edge-node-{time.monotonic_ns()}"
    )


@pytest.fixture
def ear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ear]:
    """Of the manager whose daemons are started with a watchdog of 0.6 s."""
    found = Ear(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "600000")
    with found.socket:
        yield found


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return tiny_bundle(tmp_path / "bundle", node="press-3", round_=30).folder


def test_variables_arrive_at_both_kinds_of_socket(address: str) -> None:
    ear = Ear(address)
    with ear.socket:
        ServiceManager({"NOTIFY_SOCKET": address}).notify(READY=1, STATUS="two words")
        assert ear.hear() == {"READY": "1", "STATUS": "two words"}


@pytest.mark.parametrize(
    "environment", [{}, {"NOTIFY_SOCKET": "/nowhere/notify"}, {"NOTIFY_SOCKET": "@nobody"}]
)
def test_where_nobody_listens_nothing_happens(environment: dict[str, str]) -> None:
    ServiceManager(environment).notify(READY=1)


def test_the_watchdog_is_heeded_only_when_it_watches_this_process() -> None:
    assert ServiceManager({"WATCHDOG_USEC": "30000000"}).watchdog == 30
    assert ServiceManager({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}).watchdog is None
    assert ServiceManager({"WATCHDOG_USEC": "soon"}).watchdog is None
    assert ServiceManager({}).watchdog is None


def test_ready_is_said_when_requests_are_answered_then_how_it_is_and_at_last_that_it_stops(
    bundle: Path, ear: Ear
) -> None:
    with daemon(bundle) as line:
        ready = ear.hear_until("READY")[0]
        assert ready["STATUS"] == "press-3@30: 0 images inspected"
        line.classify(RED)
        while (beat := ear.hear_until("WATCHDOG")[-1])[
            "STATUS"
        ] != "press-3@30: 1 images inspected":
            pass
        assert beat["WATCHDOG"] == "1"
        assert line.end()[0] == 0
        assert "STOPPING" in ear.hear_until("STOPPING")[-1]


@pytest.mark.slow
def test_a_model_that_does_not_load_is_never_ready(tmp_path: Path, ear: Ear) -> None:
    process = start(
        "serve",
        tmp_path,
        "--port",
        0,
        log=tmp_path / "log",
        STATE_DIRECTORY=str(tmp_path / "state"),
    )
    assert process.wait(60) == 65
    ear.socket.settimeout(0)
    with pytest.raises(BlockingIOError):
        ear.hear()


def test_a_hanging_worker_stops_the_pings_and_is_logged_and_they_come_again_when_it_goes_on(
    bundle: Path, ear: Ear, tmp_path: Path
) -> None:
    stuck, reached = tmp_path / "stuck", tmp_path / "reached"
    before = f"""
import pathlib, time
from edge.inference.predictor import Predictor
run = Predictor.run
def hanging(self, *arguments):
    while pathlib.Path({str(stuck)!r}).exists():
        pathlib.Path({str(reached)!r}).touch()
        time.sleep(0.01)
    return run(self, *arguments)
Predictor.run = hanging
"""
    watched = tmp_path / "watched"
    watched.mkdir()
    with daemon(bundle, before, watch=watched) as line:
        ear.hear_until("WATCHDOG")
        stuck.touch()
        (watched / "part.png").write_bytes(RED)
        wait_until(reached.exists)
        # a busy machine may have been slow to answer, and to say so, before the image came
        ear.miss_pings(line, 3)
        ear.socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                ear.hear()
        ear.miss_pings(line, 3)
        with pytest.raises(BlockingIOError):
            ear.hear()
        ear.socket.settimeout(PATIENCE)
        assert line.process.poll() is None
        assert line.client.get("/v2/health/ready").status_code == 503
        stuck.unlink()
        # it may be told while it waits
        while "1 images inspected" not in ear.hear_until("WATCHDOG")[-1]["STATUS"]:
            pass
        assert line.client.get("/v2/health/ready").status_code == 200
        assert line.end()[0] == 0


def test_the_pings_go_on_while_large_frames_take_longer_than_the_watchdog_waits(
    bundle: Path, ear: Ear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Pipeline(load_model(bundle), Told(), View(tile=8, overlap=0.0))
    dispatcher = Dispatcher(Instance("press", tmp_path), Limits())
    frame = np.zeros((128, 120, 3), np.uint8)  # 240 tiles: 12 s, were they not cut short
    run, begun, heard = Predictor.run, threading.Event(), threading.Event()

    def slow(self: Predictor, *arguments: Any) -> Outputs:
        begun.set()
        heard.wait(0.05)  # as a large tile takes
        return run(self, *arguments)

    monkeypatch.setattr(Predictor, "run", slow)

    async def hear() -> None:
        stop = asyncio.Event()
        judging = asyncio.create_task(line.classify(Frame("part", frame)))
        await asyncio.to_thread(begun.wait, PATIENCE)
        watchdog = asyncio.create_task(run_watchdog(line, dispatcher, ServiceManager(), stop))
        for _ in range(3):
            await asyncio.to_thread(ear.hear)
        assert line.inspected == 0
        heard.set()
        stop.set()
        await asyncio.gather(watchdog, judging)

    asyncio.run(hear())
    line.close()


def test_a_reload_is_announced_and_ends_ready_also_when_it_fails(
    bundle: Path, ear: Ear, tmp_path: Path
) -> None:
    file = tmp_path / "line.toml"
    file.write_text(f'bundle = "{bundle}"\nport = 0\n')
    process = start(
        "serve", "--config", file, log=tmp_path / "log", STATE_DIRECTORY=str(tmp_path / "state")
    )
    try:
        ear.hear_until("READY")
        for content in (file.read_text(), "wrong"):
            file.write_text(content)
            begun = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            process.send_signal(signal.SIGHUP)
            reloading = ear.hear_until("RELOADING")[-1]
            assert (
                begun
                <= int(reloading["MONOTONIC_USEC"])
                <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            )
            ear.hear_until("READY")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
