"""Growth curves: a round over nodes, bytes and rounds, a plant's work over its images;
raw lines and a picture.

    python -m benchmarks.growth benchmarks/growth.jsonl docs/growth.svg

What stands in the file is not measured again, so that a measurement that was interrupted goes on.
Rounds are those of `benchmarks.light_fleet`: light nodes, a real coordinator and mosquitto, all on
the same processors. Memory is a process's peak: the coordinator's, that of `edge-node check`, that
of a process that trains.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from benchmarks import light_fleet
from research.runner import style
from trainer.data.drawn_surfaces import CLASSES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MEGA = 1e6
_ROUNDS = 5
_FEW = 5  # nodes, where something else grows
Axis = Literal["nodes", "MB of a blob", "rounds", "images of a plant"]


class Point(msgspec.Struct, frozen=True):
    """What one measurement found."""

    over: Axis
    at: float
    curve: str
    seconds: float  # of a round; of the images' check; of training on the images for a round
    memory: float  # MB


class Case(NamedTuple):
    """A point that is to be measured; for blobs `key` is the model that has their size."""

    over: Axis
    curve: str
    key: int | str
    measure: Callable[[Path], Point]


def cases() -> list[Case]:
    """All points of the picture, the quick ones first."""
    one = "one coordinator"
    found = [
        Case("images of a plant", "edge-node check", n, _check(n))
        for n in (35, 105, 301, 1001, 3003)
    ]
    found += [
        Case("images of a plant", "a round's training", n, _training(n)) for n in (10, 32, 100, 320)
    ]
    found += [
        Case("MB of a blob", one, name, _fleet("MB of a blob", one, _FEW, name))
        for name in ("small", "maps_small", "mobilenet_v2", "efficientnet_lite0", "resnet18")
    ]
    found += [
        Case("rounds", one, n, _fleet("rounds", one, _FEW, "small", rounds=n))
        for n in (10, 32, 100, 320, 1000)
    ]
    found += [
        Case("nodes", one, n, _fleet("nodes", one, n, "maps_small")) for n in (10, 30, 100, 300)
    ]
    return found


def _fleet(
    over: Axis, curve: str, nodes: int, model: str, *, rounds: int = _ROUNDS
) -> Callable[[Path], Point]:
    def measure(folder: Path) -> Point:
        found = light_fleet.measure(nodes, rounds, model, folder)
        assert found.wrong == 0, found
        at = {"nodes": nodes, "MB of a blob": found.blob, "rounds": rounds}[over]
        return Point(over, at, curve, found.seconds, found.coordinator_peak)

    return measure


def _check(images: int) -> Callable[[Path], Point]:
    def measure(folder: Path) -> Point:
        count = images // len(CLASSES)
        _run(
            "edge_node",
            "surfaces",
            folder,
            "--plants",
            "1",
            "--per-class",
            count,
            "--json",
        )
        found = _run("edge_node", "check", folder / "plant-1", "--json")
        return Point(
            "images of a plant",
            count * len(CLASSES),
            "edge-node check",
            found.seconds,
            found.memory,
        )

    return measure


def _training(images: int) -> Callable[[Path], Point]:
    def measure(_: Path) -> Point:
        settings = (
            "--nodes",
            2,
            "--samples",
            images,
            "--size",
            128,
            "--only",
            "plain",
            "--repetitions",
            1,
            "--json",
        )
        found = _run("benchmarks.simulation_speed", *settings)
        rate = json.loads(found.output)["nodes_per_second"]["plain"]["median"]
        return Point("images of a plant", images, "a round's training", 1 / rate, found.memory)

    return measure


class _Ended(NamedTuple):
    output: bytes
    seconds: float
    memory: float  # MB, peak


def _run(module: str, *words: object) -> _Ended:
    """Run a module to its end."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, words)], stdout=subprocess.PIPE
    )
    assert process.stdout
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return _Ended(output, time.perf_counter() - started, used.ru_maxrss * 1024 / _MEGA)


def measure(file: Path) -> list[Point]:
    """All points: those that the file has, and the others,
    which are added to it as they are measured.
    """
    known: dict[str, Point] = {}
    if file.exists():
        for line in file.read_text().splitlines():
            known |= msgspec.json.decode(line, type=dict[str, Point])
    for case in cases():
        name = f"{case.curve}, {case.key} {case.over}"
        if name not in known:
            with tempfile.TemporaryDirectory() as folder:
                known[name] = case.measure(Path(folder))
            line = msgspec.json.encode({name: known[name]}).decode()
            print(line, flush=True)
            with file.open("a") as out:
                out.write(line + "\n")
    return list(known.values())


def draw(points: list[Point]) -> tuple["Figure", str]:
    """Seconds above, memory below, both axes logarithmic; a column for what grows."""
    overs = list(dict.fromkeys(case.over for case in reversed(cases())))
    figure, panels = style.grid(2, len(overs), 2.9, 2.3)
    curves = sorted({point.curve for point in points})
    for column, over in enumerate(overs):
        for row, what in enumerate(("seconds", "memory")):
            axes = panels[row][column]
            for number, curve in enumerate(curves):
                own = sorted(
                    (p.at, getattr(p, what)) for p in points if (p.over, p.curve) == (over, curve)
                )
                if own:
                    marker = f"{style.MARKERS[number]}-"
                    axes.plot(
                        *zip(*own, strict=True),
                        marker,
                        color=style.COLOURS[number],
                        ms=4,
                        label=curve,
                    )
            axes.set(xscale="log", yscale="log", xlabel=over if row else "")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_ylim(*((0.01, 100) if what == "seconds" else (30, 3000)))
    for row, label in enumerate(("seconds", "peak memory, MB")):
        panels[row][0].set_ylabel(label)
    style.legend(figure, panels)
    return figure, (
        f"Coordinators: seconds of a round without training, {_ROUNDS} rounds unless these grow, "
        f"blobs of 1.2 MB where nodes grow, of 0.24 MB where rounds do, {_FEW} nodes elsewhere, "
        "on two cores. Plants: seconds of a check, and of a round's training of MobileNetV2 at "
        "128 px on one thread."
    )


def main() -> None:
    """Measure what is missing, and draw all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", type=Path, help="JSON lines, one a measurement")
    parser.add_argument("picture", type=Path)
    asked = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    points = measure(asked.lines)
    style.write(lambda: draw(points), asked.picture)


if __name__ == "__main__":
    main()
