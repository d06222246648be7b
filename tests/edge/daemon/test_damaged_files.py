"""Every file of a line, damaged: it serves on and loses no verdict unsaid,
or a message names file and remedy.
"""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from broker_config.protocol.errors import EdgeNodeError
from broker_config.security import trust
from edge.bundle.bundle_format import CHARTER, MANIFEST, SIGNATURE
from edge.http.login import Accounts
from edge.inference.outcomes import current_time, new_id
from edge.labelling.label_history import LabelHistory, Labelling
from edge.registry.bundle_store import line_store
from tests.support.damaged_files import (
    FAULTS,
    LOSS_TOLD,
    RECOVERED,
    Case,
    Outcome,
    Snapshot,
    try_all,
    unknown,
)
from tests.support.federation_keys import FederationKeys
from tests.support.ports import free_port
from tests.support.tiny_bundle import BLUE, GREEN, RED
from tests.support.waiting import wait_until

KNOWN = (
    "line/spool/line-1/lock",
    "line/spool/line-1/newest",
    "line/spool/line-1/origin",
    "line/spool/line-1/outcomes.sqlite*",
    "line/sources/*.sqlite*",
    "line/plant-a@test.json",
    "line/bundles/line-1/daemon",
    "line/bundles/line-1/state.json",
    "line/bundles/line-1/record.jsonl",
    *(
        f"line/bundles/line-1/????????????/{each}"
        for each in (MANIFEST, SIGNATURE, CHARTER, "model.onnx", "golden.png")
    ),
    "line/kept/*",
    "line/accounts.json*",
    "line/images/labels-line-1.jsonl*",
)
COLORS = {"red": RED, "green": GREEN, "blue": BLUE}
TOLD = ("ends with number", "cannot be read", "is damaged")
WITHOUT_LABELS = "serves without labels"


class Receiver:
    """What the webhook posts to; away while it is not entered."""

    def __init__(self) -> None:
        self.port = free_port()
        self.outcomes: list[dict[str, Any]] = []

    def __enter__(self) -> "Receiver":
        receiver = self
        self.outcomes = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.outcomes += found if isinstance(found, list) else [found]
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Line:
    """A line that was killed while its receiver was away,
    with an older copy of its state folder.
    """

    def __init__(self, folder: Path):
        self._folder, self._receiver = folder, Receiver()
        self._camera, self._scratch = folder / "camera", folder / "scratch"
        self._camera.mkdir()
        keys = FederationKeys()
        (folder / "trust").write_bytes(trust.encode(keys.trust()))
        self._bundles = [keys.bundle(folder / each) for each in ("first", "second")]
        self.snapshot = Snapshot(
            folder / "newer", folder / "older", lambda file: file.split("/")[1]
        )
        self._judge_and_kill(3)
        Accounts(self.snapshot.newer / "line").set("anna", "correct horse")
        self._label()
        self.snapshot.copy([], self.snapshot.older)
        store = line_store(self.snapshot.newer / "line", "line-1")
        store.record_activation(store.add(self._bundles[1], "test"), "test", trial=False)
        self._judge_and_kill(6)
        Accounts(self.snapshot.newer / "line").set("bert", "battery staple")
        self._label()
        self._put_images(8)

    def _label(self) -> None:
        history = LabelHistory(self.snapshot.newer / "line/images/labels-line-1.jsonl")
        history.add(
            Labelling(id=new_id(), time=current_time(), person="anna", label=None, images=())
        )

    def _put_images(self, count: int) -> None:
        for number in range(count):
            color = [*COLORS][number % 3]
            if not (path := self._camera / f"{number}-{color}.png").exists():
                path.write_bytes(COLORS[color])

    def _serve(self, folder: Path) -> subprocess.Popen[str]:
        settings = self._folder / "line.toml"
        settings.write_text(
            f"""
bundle = "{self._bundles[0]}"
trust = "{self._folder / "trust"}"
[[sources]]
kind = "folder"
path = "{self._camera}"
[[sinks]]
kind = "webhook"
url = "http://127.0.0.1:{self._receiver.port}/"
[keep]
path = "{folder / "line/kept"}"
what = "all"
images = 2
[labels]
path = "{folder / "line/images"}"
"""
        )
        words = ("serve", "--config", settings, "--state", folder / "line", "--port", "0")
        return subprocess.Popen(
            [sys.executable, "-m", "edge_node", *map(str, words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _judge_and_kill(self, count: int) -> None:
        outbox = self.snapshot.newer / "line/spool/line-1/outcomes.sqlite"
        with self._serve(self.snapshot.newer) as process:
            assert process.stderr
            assert any(line.startswith("ready ") for line in process.stderr)
            self._put_images(count)
            with contextlib.closing(sqlite3.connect(outbox)) as rows:
                wait_until(
                    lambda: rows.execute("SELECT COUNT(*) FROM outcomes").fetchone()[0] >= count
                )
            process.kill()

    def start(self, folder: Path, _: str) -> Outcome:
        names = {path.name for path in self._camera.iterdir()}
        fresh = {name for name in names if name[0] in "67"}
        with self._receiver as receiver, self._serve(folder) as process:

            def silence() -> str:
                process.kill()
                return f"silence: {receiver.outcomes} {process.communicate()[1]}"

            def over() -> bool:
                return process.poll() is not None or fresh <= {
                    each.get("image") for each in receiver.outcomes
                }

            wait_until(over, said=silence)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        assert "Traceback" not in said, said
        assert "bug in edge-node" not in said, said
        if process.returncode:
            assert process.returncode in (os.EX_DATAERR, os.EX_NOINPUT, os.EX_CONFIG), said
            refusal = re.search(r"^edge-node: (.*)\n  What to do: (.*)$", said, re.MULTILINE)
            assert refusal, said
            raise EdgeNodeError(refusal[1], refusal[2])
        Accounts(folder / "line").read()  # a verdict needs nobody's login
        verdicts = [each for each in receiver.outcomes if "label" in each]
        assert all(each["label"] in each["image"] for each in verdicts), verdicts
        numbers = {(each["seq"], each["id"]) for each in receiver.outcomes}
        assert len({seq for seq, _ in numbers}) == len(numbers), numbers
        if lost := names - {each["image"] for each in verdicts}:
            assert any(words in said for words in TOLD), (lost, said)
            return LOSS_TOLD
        return LOSS_TOLD if WITHOUT_LABELS in said else RECOVERED

    def try_all(self, cases: list[Case]) -> None:
        try_all("line", self.snapshot, cases, self.start, self._scratch, most=2)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    return Line(tmp_path_factory.mktemp("line"))


@pytest.mark.slow
def test_every_file_is_of_a_known_kind(line: Line) -> None:
    assert unknown(line.snapshot.files(), KNOWN) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_each_file_ends_well(fault: str, line: Line) -> None:
    line.try_all([case for case in line.snapshot.cases() if case.fault == fault])
