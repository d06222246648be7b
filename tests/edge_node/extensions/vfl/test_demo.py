"""Drawn lines, and the demo of sensors that learn together: the whole story in one command."""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from sklearn.linear_model import LogisticRegression

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.drawn_products import (
    CLASSES,
    LABELS,
    DrawnStations,
    append_at_rate,
    append_products,
    count_labelled,
)
from tests.support.manual_clock import Clock
from tests.support.plants import here

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [3, 11])
def test_a_drawn_line_hangs_on_its_seed_alone_however_it_is_cut(tmp_path: Path, seed: int) -> None:
    line = DrawnStations(3, seed)
    append_products(line, tmp_path / "whole", 0, 700)
    append_products(line, tmp_path / "parts", 0, 1)
    ticks = iter(range(1000))
    assert (
        append_at_rate(
            DrawnStations(3, seed),
            tmp_path / "parts",
            range(1, 700),
            1e4,
            lambda: next(ticks) == 900,
        )
        == 699
    )
    assert count_labelled(tmp_path / "parts") == 700
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()
    append_products(DrawnStations(3, seed + 1), tmp_path / "other", 0, 700)
    assert (tmp_path / "other" / LABELS).read_bytes() != (tmp_path / "whole" / LABELS).read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_several_stations_of_a_drawn_line_tell_more_than_one(seed: int) -> None:
    products = DrawnStations(3, seed).draw(0, 1500)
    assert np.bincount(products.labels, minlength=len(CLASSES)).min() > 100

    def accuracy(*rows: np.ndarray) -> float:
        values = np.concatenate([(each - each.mean(0)) / each.std(0) for each in rows], 1)
        fitted = LogisticRegression(max_iter=500).fit(values[:1000], products.labels[:1000])
        return float(fitted.score(values[1000:], products.labels[1000:]))

    alone = [accuracy(each) for each in products.rows]
    assert accuracy(*products.rows) > max(alone) + 0.1
    assert min(alone) > 0.35


def test_a_stream_keeps_to_its_rate_and_stops_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def rest(seconds: float) -> None:
        clock.now += 2 * seconds  # as on a busy machine

    monkeypatch.setattr(
        "edge_node.extensions.vfl.drawn_products.time", SimpleNamespace(monotonic=clock, sleep=rest)
    )
    count = append_at_rate(
        DrawnStations(2, 0), tmp_path, range(10_000), 256.0, lambda: clock.now > 0.5
    )
    assert count == 256 * 0.5 + 1
    assert count_labelled(tmp_path) == count


def test_drawing_goes_on_where_it_was_and_says_how_sensors_join(tmp_path: Path) -> None:
    for products in ("30", "12"):
        drawn = here(
            "vfl", "draw", tmp_path, "--stations", "2", "--products", products, "--seed", "4"
        )
        assert drawn.returncode == 0, drawn.stderr
    with (tmp_path / "oven.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["product"] for row in rows] == [f"P{n:06}" for n in range(42)]
    assert (
        f"--sensor oven --columns {','.join(list(rows[0])[1:])} --data {tmp_path / 'oven.csv'}"
        in drawn.stdout
    )


@pytest.mark.parametrize("stations", [1, 7])
def test_a_drawn_line_has_a_few_stations(stations: int) -> None:
    with pytest.raises(UsageError, match="stations"):
        DrawnStations(stations, 0)


class Demo:
    """A run of `edge-node vfl demo`, over: its folder, its result,
    its processes that are left, its seconds.
    """

    def __init__(self, folder: Path):
        self.folder, started = folder, time.monotonic()
        ran = subprocess.run(
            [
                sys.executable,
                "-m",
                "edge_node",
                "vfl",
                "demo",
                "--json",
                "--keep",
                str(folder),
                "--seed",
                "7",
            ],
            check=False,
            capture_output=True,
            env={**os.environ, "EDGE_NODE_MARK": str(folder)},
            timeout=200,
        )
        assert ran.returncode == 0, ran.stderr.decode()
        self.seconds = time.monotonic() - started
        self.result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])["result"]

    def left(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.environ().get("EDGE_NODE_MARK") == str(self.folder):
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo(tmp_path_factory.mktemp("line") / "demo")


def test_the_sensors_together_know_more_than_without_one_of_them_and_that_more_than_guessing(
    demo: Demo,
) -> None:
    accuracy = {each["absent"]: each["accuracy"] for each in demo.result["judged"]}
    together = accuracy.pop("")
    assert set(accuracy) == set(demo.result["sensors"]) == {"press", "oven", "spindle"}
    assert together > 0.7
    assert together > max(accuracy.values())
    assert min(accuracy.values()) > demo.result["guessing"]


def test_the_demo_measures_and_leaves_what_it_says(demo: Demo) -> None:
    assert demo.result["rounds"] == 60
    assert demo.result["milliseconds_round"] > 0
    assert demo.result["seconds"] <= demo.seconds
    assert {path.name for path in demo.folder.iterdir() if path.is_dir()} >= {
        "head",
        "press",
        "oven",
        "spindle",
        "logs",
    }
    predictions = [
        json.loads(text) for text in (demo.folder / "predictions.jsonl").read_text().splitlines()
    ]
    assert len(predictions) == 4 * demo.result["products"]
    assert not list(demo.left())
