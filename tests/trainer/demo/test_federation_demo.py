"""The demo: the whole story in one command, and nothing left behind however it ends."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from broker_config.security.secret_environment import PASSPHRASE, PASSWORD
from tests.support.plants import CLASSES, draw, here
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

QUICK = ("--nodes", "2", "--rounds", "3", "--model", "small")


def _heed_ctrl_c() -> None:
    """A shell's background jobs ignore SIGINT, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Demo:
    """A running `edge-node demo`; every process that descends from it carries its mark."""

    def __init__(self, out: Path, *flags: str):
        self.mark, self.out, self.log = uuid.uuid4().hex, out, out.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "edge_node",
                    "demo",
                    "--out",
                    str(out),
                    *QUICK,
                    *flags,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "EDGE_NODE_MARK": self.mark,
                    PASSWORD: "a secret",
                    PASSPHRASE: "another",
                },
                preexec_fn=_heed_ctrl_c,  # noqa: PLW1509  (no threads here)
            )

    def marked(self) -> Iterator[psutil.Process]:
        """The processes that descend from the demo, itself not included."""
        for process in psutil.process_iter():
            try:
                if (
                    process.pid != self.process.pid
                    and process.environ().get("EDGE_NODE_MARK") == self.mark
                ):
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue

    def wait_for(self, *words: str) -> psutil.Process:
        """The process with these words in its command line, once it runs."""

        def found() -> list[psutil.Process]:
            return [each for each in self.marked() if set(words) <= set(each.cmdline())]

        return wait_until(found, said=lambda: f"no process {words}:\n{self.log.read_text()}")[0]

    def wait_for_text(self, text: str) -> None:
        """Until the demo has said this."""
        wait_until(lambda: text in self.log.read_text(), said=self.log.read_text)

    def kill(self) -> None:
        """Whatever is left of it."""
        self.process.kill()
        for process in self.marked():
            process.kill()

    def end(self, timeout: float = 60) -> tuple[int, str]:
        """Exit code and output; what is left afterwards fails the test."""
        code = self.process.wait(timeout)
        # A supervisor whose parent has ended then ends its broker.
        wait_until(lambda: not list(self.marked()), said=lambda: list(self.marked()))
        return code, self.log.read_text()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for --data: drawing the demo's own takes longer."""
    return draw(
        tmp_path_factory.mktemp("data") / "images", 24, seed=3, classes=("crazing", *CLASSES)
    )


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Starts a demo in `tmp_path/run`; nothing of it outlives the test."""
    running: list[Demo] = []

    def start(*flags: str) -> Demo:
        running.append(Demo(tmp_path / "run", *flags))
        return running[-1]

    yield start
    for each in running:
        each.kill()


def test_the_demo_learns_exports_serves_and_reports(
    demo: Callable[..., Demo], tmp_path: Path
) -> None:
    code, said = demo("--seed", "5").end(180)
    assert code == 0, said
    report = json.loads((tmp_path / "run" / "report.json").read_bytes())
    assert report["method"] == "afedcl_plus"
    assert report["rounds"] == 5  # sums before three rounds of training, and after them
    assert [node["name"] for node in report["nodes"]] == ["plant-1", "plant-2"]
    for node in report["nodes"]:
        assert len(node["classes"]) == 4
        # The temperature is cross-fitted where the model is judged: this turns a few verdicts on
        # classes that were never taught.
        few = 4.01 / node["test_images"]
        assert node["onnx_accuracy"] == pytest.approx(node["accuracy"], abs=few)
        candidates = {
            name: node["comparison"][name]["accuracy"] for name in ("alone", "together", "mixed")
        }
        assert node["accuracy"] == candidates[node["comparison"]["deployed"]]
        assert node["accuracy"] >= max(candidates.values()) - few
        assert 0 < node["first"]["seconds"] < report["seconds"]
        assert node["first"]["low"] < node["first"]["accuracy"] < node["first"]["high"]
        training = node["comparison"]["training"]
        assert training["images"] == node["test_images"]
        if not training["is_shown"]:
            assert node["accuracy"] == node["first"]["accuracy"]
        assert 0 <= node["accuracy_others"] <= 1
        assert 0 < node["accuracy_all"] <= 1
        assert [line["round"] for line in node["history"]] == [1, 2, 3, 4, 5]
        assert "L_C" in node["history"][1]
    # Two nodes, three rounds of training, and two of sums; the largest contribution would be of 240
    # kB in full.
    assert 15_000 < report["model_bytes"] < 40_000
    assert 5 < report["bytes_up"] / report["model_bytes"] <= 10
    assert report["bytes_down"] > 0
    assert report["serving"]["agreeing"] == report["serving"]["images"] > 0
    served = report["nodes"][0]
    assert report["serving"]["node"] == served["name"]
    few = 4.01 / served["test_images"]
    assert report["serving"]["accuracy"] == pytest.approx(served["accuracy"], abs=few)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "What 2 nodes learnt" in page
    assert "When each node did what" in page
    assert "report: file:///" in said
    assert "plant-2" in said


def test_a_trainer_that_dies_is_named(demo: Callable[..., Demo], images: Path) -> None:
    running = demo("--rounds", "1000", "--data", str(images))
    running.wait_for_text("round 1 closed")
    assert [
        each for each in running.marked() if {PASSWORD, PASSPHRASE} & each.environ().keys()
    ] == []
    running.wait_for("join", "plant-2").send_signal(signal.SIGKILL)
    code, said = running.end()
    assert code == 1
    assert "plant-2 was killed" in said
    assert "plant-2.log" in said


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("while drawing", signal.SIGINT),
        ("while the broker starts", signal.SIGINT),
        ("while trainers start", signal.SIGTERM),
        ("while they train", signal.SIGINT),
    ],
)
def test_ctrl_c_or_sigterm_leaves_no_process_behind(
    moment: str, number: signal.Signals, demo: Callable[..., Demo], images: Path
) -> None:
    running = demo(
        "--rounds", "1000", *(() if moment == "while drawing" else ("--data", str(images)))
    )
    if moment == "while the broker starts":
        wait_until(lambda: any(running.marked()))
    elif moment == "while trainers start":
        running.wait_for("join", "plant-1")
    elif moment == "while they train":
        running.wait_for_text("round 1 closed")
    else:
        running.wait_for_text("drawing")
    running.process.send_signal(number)
    code, _ = running.end()
    assert code == 130


def test_a_folder_that_is_not_a_demos_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    refused = here("demo", "--out", tmp_path, *QUICK)
    assert refused.returncode == 2
    assert "earlier demo" in refused.stderr
    assert (tmp_path / "thesis.txt").exists()
