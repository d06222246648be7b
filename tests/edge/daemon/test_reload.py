"""SIGHUP: a running line becomes what its file says now, without losing a frame or an outcome."""

import asyncio
import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.config.instance import Instance
from edge.daemon.dispatcher import Dispatcher
from edge.daemon.line_settings import Settings, parse
from edge.daemon.logs import Log
from edge.daemon.logs import Settings as LogSettings
from edge.daemon.monitors import Monitors
from edge.daemon.reload import Reloader
from edge.inference.class_prior import Prior
from edge.inference.pipeline import Frame, Pipeline
from edge.inference.served_model import load_model
from edge.outbox.limits import Limits
from edge.uncertainty.drift import Settings as Drifting
from edge.uncertainty.image_retention import ImageRetention
from edge.uncertainty.uncertainty_check import Settings as Doubting
from tests.support.classified_images import Told, judged_bundle, pictures
from tests.support.plants import start
from tests.support.tiny_bundle import BLUE, GREEN, RED, png, tiny_bundle
from tests.support.waiting import PATIENCE, wait_until

DONE, FAILED = "the settings were read again", "the settings stay as they were"
HEAD = 'bundle = "bundle"\nport = 0\n[log]\nlevel = "info"\n'


class Running:
    """A line with the settings in its file."""

    def __init__(self, folder: Path, *flags: object, head: str = HEAD, **environment: str) -> None:
        self.folder, self.head = folder, head
        self.file, self.log = folder / "line.toml", folder / "log"
        self.environment = {"STATE_DIRECTORY": str(folder / "state"), **environment}
        self.flags = flags

    def begin(self, tables: str) -> None:
        self.write(tables)
        self.process = start(
            "serve", "--config", self.file, *self.flags, log=self.log, **self.environment
        )
        self.say_until("ready http")
        url = next(
            line.split()[1]
            for line in self.log.read_text().splitlines()
            if line.startswith("ready ")
        )
        self.client = httpx.Client(base_url=url, timeout=PATIENCE)

    def write(self, tables: str) -> None:
        self.file.write_text(self.head + tables)

    def say_until(self, text: str, count: int = 1) -> str:
        """Its log, as soon as that says something so often."""

        def alive() -> bool:
            return self.process.poll() is None

        wait_until(
            lambda: self.log.read_text().count(text) >= count,
            meanwhile=alive,
            said=self.log.read_text,
        )
        return self.log.read_text()

    def reload(self, tables: str, says: str = DONE) -> str:
        """Read the file again; what it says then."""
        count = self.log.read_text().count(says)
        self.write(tables)
        self.process.send_signal(signal.SIGHUP)
        return self.say_until(says, count + 1)

    def classify(self, data: bytes, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.post(
            "/classify", params={"name": name}, content=data
        ).json()
        return found

    def outcomes(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def outcomes_until(self, name: str, count: int) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.outcomes(name)) >= count)
        return self.outcomes(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_bundle(tmp_path / "bundle", node="press-3", round_=30)
    for name in ("camera", "second"):
        (tmp_path / name).mkdir()
    return tmp_path


@contextlib.contextmanager
def running(
    folder: Path, tables: str, *flags: object, head: str = HEAD, **environment: str
) -> Iterator[Running]:
    line = Running(folder, *flags, head=head, **environment)
    line.begin(tables)
    try:
        with line.client:
            yield line
            line.process.send_signal(signal.SIGTERM)
            assert line.process.wait(PATIENCE) == 0, line.log.read_text()
    finally:
        line.process.kill()


def sinks(*names: str) -> str:
    return "".join(f'[[sinks]]\nkind = "jsonl"\npath = "{name}"\n' for name in names)


def source(name: str, **more: object) -> str:
    return f'[[sources]]\nkind = "folder"\npath = "{name}"\n' + "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in more.items()
    )


@pytest.mark.slow
def test_while_sinks_are_replaced_under_load_no_outcome_is_lost_and_a_sink_that_stays_has_each_once(
    folder: Path,
) -> None:
    ids: list[str] = []
    ending = threading.Event()

    def load(client: httpx.Client) -> None:
        while not ending.is_set():
            ids.append(client.post("/classify", content=RED).json()["id"])

    with running(folder, sinks("steady", "a")) as line:
        loaders = [threading.Thread(target=load, args=(line.client,)) for _ in range(2)]
        for each in loaders:
            each.start()
        for number in range(6):
            line.reload(sinks("steady", "ab"[(number + 1) % 2]))
        ending.set()
        for each in loaders:
            each.join()
    assert len(ids) > 6  # more than reloads, on a machine however slow
    assert [each["id"] for each in line.outcomes("steady")] == sorted(
        set(ids), key=[each["id"] for each in line.outcomes("steady")].index
    )
    both = [each["id"] for name in "ab" for each in line.outcomes(name)]
    assert set(both) == set(ids)
    assert len(line.outcomes("a")) > 0 < len(line.outcomes("b"))


@pytest.mark.slow
def test_sources_come_and_go_and_one_that_stays_brings_nothing_twice(folder: Path) -> None:
    with running(folder, source("camera") + sinks("out")) as line:
        (folder / "camera" / "1.png").write_bytes(RED)
        (folder / "second" / "2.png").write_bytes(GREEN)
        line.outcomes_until("out", 1)
        line.reload(source("camera") + source("second") + sinks("out"))
        line.outcomes_until("out", 2)
        # replaced by one that includes sub-folders
        line.reload(source("camera", recursive=True) + sinks("out"))
        (folder / "second" / "3.png").write_bytes(GREEN)
        (folder / "camera" / "deep").mkdir()
        (folder / "camera" / "deep" / "4.png").write_bytes(BLUE)
        found = line.outcomes_until("out", 3)
    assert [Path(each["image"]).name for each in found] == ["1.png", "2.png", "4.png"]
    assert len(line.outcomes("out")) == 3


def test_a_line_without_sinks_gets_some_and_loses_them_again(folder: Path) -> None:
    with running(folder, "") as line:
        line.classify(RED, "one")
        line.reload(sinks("out"))
        line.classify(RED, "two")
        line.outcomes_until("out", 1)
        line.reload("")
        line.classify(RED, "three")
        line.reload(sinks("out"))
        line.classify(RED, "four")
        found = line.outcomes_until("out", 2)
    assert [each["image"] for each in found] == ["two", "four"]


def test_the_view_counts_from_the_next_frame_on_and_the_log_too(folder: Path) -> None:
    with running(folder, "") as line:
        assert line.classify(RED, "one")["defect"]
        line.reload('[view]\nno_defect = "red"\n')
        assert not line.classify(RED, "two")["defect"]
        line.head = 'bundle = "bundle"\nport = 0\n'
        line.write('[log]\nlevel = "info"\npath = "moved"\n')
        line.process.send_signal(signal.SIGHUP)
        wait_until(lambda: (folder / "moved").exists() and DONE in (folder / "moved").read_text())


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ("[veiw]\n", "did you mean 'view'?"),
        ("half a", "is not TOML"),
        ('[view]\nno_defect = "purple"\n', "purple"),
        ("[prior.classes]\ngrene = 2.0\n", "did you mean 'green'?"),
        ("[prior]\nuntaught = 0\n", "prior.untaught"),
        (sinks("out", "none/out"), "cannot write verdicts to"),
        (source("none"), "there is no folder"),
        (sinks("out", "out"), "two sinks are the same"),
        ('[log]\npath = "none/log"\n', "cannot write the log"),
    ],
)
def test_a_wrong_file_leaves_everything_as_it_was_and_says_what_to_do(
    folder: Path, tables: str, why: str
) -> None:
    head = HEAD if "[log]" not in tables else 'bundle = "bundle"\nport = 0\n'
    with running(folder, sinks("out")) as line:
        line.head = head
        said = line.reload(tables, FAILED)
        assert why in said
        assert "What to do:" in said
        line.classify(RED, "still")
        assert [each["image"] for each in line.outcomes_until("out", 1)] == ["still"]


def test_what_needs_a_restart_is_said_and_what_was_typed_or_set_still_beats_the_file(
    folder: Path,
) -> None:
    environment = {"EDGE_NODE_SERVE_THREADS": "1", "EDGE_NODE_SERVE_LINE": "not what is typed"}
    with running(folder, "", "--line", "press", head="threads = 2\n" + HEAD, **environment) as line:
        line.head = 'threads = 3\nline = "other"\nhost = "::1"\n' + HEAD
        said = line.reload("[spool]\noutcomes = 5\n")
    assert "host was changed" in said
    assert "[spool] was changed" in said
    assert "threads" not in said
    assert "line was changed" not in said


def test_without_a_file_it_ends_in_order(folder: Path) -> None:
    log = folder / "log"
    process: subprocess.Popen[bytes] = start(
        "serve", folder / "bundle", "--port", 0, log=log, STATE_DIRECTORY=str(folder / "state")
    )
    try:
        while "ready" not in log.read_text():
            assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGHUP)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()


def parts(folder: Path, monitors: type[Monitors] = Monitors) -> tuple[Pipeline, Reloader]:
    """Those of a line in this process."""
    line, instance = (
        Pipeline(load_model(folder / "bundle"), Told()),
        Instance("press", folder / "state"),
    )
    return line, Reloader(
        line, Dispatcher(instance, Limits()), monitors(line), instance, Log(LogSettings())
    )


def watch(folder: Path, *names: str) -> Settings:
    return parse(
        {"sources": [{"kind": "folder", "path": name} for name in names]}, folder / "line.toml"
    )


def test_a_source_that_goes_while_others_end_is_missing_alone_and_there_after_the_next_reload(
    folder: Path,
) -> None:
    third = folder / "third"

    class Unmounting(Monitors):
        async def apply(self, wanted: Settings, keep: ImageRetention | None) -> None:
            """What comes between the trial and the use of it."""
            await super().apply(wanted, keep)
            if third.exists():
                third.rmdir()

    line, found = parts(folder, Unmounting)

    def fed() -> list[str]:
        return sorted(Path(each.wanted.path).name for each in found._sources if not each.is_over)  # type: ignore[union-attr]

    async def run() -> None:
        await found.apply(watch(folder, "camera"))
        third.mkdir()
        with pytest.raises(UsageError, match="third"):
            await found.apply(watch(folder, "third", "second"))
        assert fed() == ["second"]
        await found.apply(watch(folder, "camera", "second"))
        assert fed() == ["camera", "second"]
        found._sources[0].stop.set()  # as a reload does that fails before the source is replaced
        await found.apply(watch(folder, "camera", "second"))
        assert fed() == ["camera", "second"]
        await found.stop_sources()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    line.close()


def test_what_a_refused_reload_had_prepared_ends_with_it(folder: Path) -> None:
    line, found = parts(folder)

    async def run() -> None:
        await found.apply(parse({"keep": {"path": "kept"}}, folder / "line.toml"))
        for path in ("kept", "other"):
            tables = {"keep": {"path": path}, "sinks": [{"kind": "jsonl", "path": "none/out"}]}
            with pytest.raises(EdgeNodeError, match="none/out"):
                await found.apply(parse(tables, folder / "line.toml"))
        assert [each.name for each in threading.enumerate()].count("keep") == 1

    asyncio.run(run())
    line.close()


def test_another_prior_changes_verdicts_without_another_bundle_and_what_was_typed_beats_it(
    tmp_path: Path,
) -> None:
    # and other plants green
    bundle = tiny_bundle(tmp_path / "bundle", trained={"red": 4, "blue": 4})
    greenish = png((100, 130, 0))  # 3.2 times as likely as red
    with running(tmp_path, "", "--prior", "blue=0.5") as line:
        before = line.classify(greenish, "one")
        assert (before["label"], before["taught"]) == ("red", True)
        line.reload("[prior]\nuntaught = 1.0\n[prior.classes]\nblue = 9.0\n")
        after = line.classify(greenish, "two")
        assert (after["label"], after["taught"]) == ("green", False)
        assert after["model"] == before["model"] == bundle.digest[:12]
        about = line.client.get("/").json()
        assert (about["untaught"], about["prior"]) == (
            ["green"],
            {"red": 1.0, "green": 1.0, "blue": 0.5},
        )
        counted = [
            row for row in line.client.get("/metrics").text.splitlines() if 'taught="false"' in row
        ]
        assert len(counted) == 1
        assert 'label="green"' in counted[0]


def test_another_prior_measures_drift_anew(tmp_path: Path) -> None:
    line = Pipeline(load_model(judged_bundle(tmp_path / "bundle")), Told())
    monitors = Monitors(line)
    found = []

    async def run() -> None:
        for prior in (Prior(), Prior(), Prior(untaught=0.5)):
            await monitors.apply(Settings(prior=prior), None)
            found.append(monitors._drift)

    asyncio.run(run())
    line.close()
    assert found[0] is found[1]
    assert found[1] is not found[2]


def test_an_alarm_about_drift_that_other_settings_forget_is_told_to_be_over(tmp_path: Path) -> None:
    told = Told()
    line = Pipeline(load_model(judged_bundle(tmp_path / "bundle")), told)
    monitors = Monitors(line)

    async def run() -> None:
        await monitors.apply(Settings(drift=Drifting(window=60)), None)
        for image in pictures(120, 7):
            await line.classify(Frame("part", (image * 0.8).astype(np.uint8)))
        for _ in range(2):
            await monitors.apply(
                Settings(drift=Drifting(window=60), doubt=Doubting(confidence=0.5)), None
            )

    asyncio.run(run())
    line.close()
    assert [each.details["state"] for each in told.notices] == ["drifted", "ordinary"]
