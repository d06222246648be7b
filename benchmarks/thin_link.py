"""Cost of a thin link: nodes that train, each behind a link of its own,
and what their timelines say of the rounds.

    python -m benchmarks.thin_link --data NEU-CLS --weights mobilenet_v2_imagenet.safetensors
    --codec int4 none

Coordinator and broker are where the links end. A node *moves* a round's tensors while it receives
the broadcast and sends its contribution, but for what it trains meanwhile (stage 2). The first two
rounds, whose tensors are other ones, and the last one are left out. While a node moves tensors and
waits it trains without the others, for the comparison at the end, so what a link costs it in the
end is told by the time from its first broadcast to its personal model: over that link, and over
none, several times in turns where one pair of runs does not tell them apart.
"""

import argparse
import asyncio
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from broker_config.broker.embedded import start_broker
from trainer.progress.timeline import Span, read_spans
from trainer.training.personal_model import load_metadata

_PIECE = 16 * 1024  # bytes that travel together


class Link:
    """Forwards connections to `port`, `rate` bytes a second and `delay` seconds each way."""

    def __init__(self, port: int, rate: float, delay: float):
        self._target, self._rate, self._delay = port, rate, delay
        self._open = threading.Event()
        threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True).start()
        assert self._open.wait(60)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port: int = server.sockets[0].getsockname()[1]
        # when the link has sent all that it was given; connections share it
        self._free = {"up": 0.0, "down": 0.0}
        self._open.set()
        await server.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(
            self._carry("up", reader, far_writer),
            self._carry("down", far_reader, writer),
            return_exceptions=True,
        )

    async def _carry(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(_PIECE):
            self._free[way] = max(self._free[way], loop.time()) + len(data) / self._rate
            loop.call_at(self._free[way] + self._delay, writer.write, data)
            await asyncio.sleep(self._free[way] - loop.time())
        loop.call_later(self._delay, writer.close)


def copy_images(source: Path, folder: Path, nodes: int, images: int) -> list[Path]:
    """A folder for each node with so many images of each class, its own."""
    for label in filter(Path.is_dir, source.iterdir()):
        paths = sorted(label.iterdir())
        for node in range(nodes):
            target = folder / f"node-{node}" / label.name
            target.mkdir(parents=True)
            for path in paths[node * images : (node + 1) * images]:
                shutil.copy(path, target)
    return [folder / f"node-{node}" for node in range(nodes)]


def federate(
    asked: argparse.Namespace, codec: str, rate: float, delay: float
) -> list[tuple[list[Span], float]]:
    """The spans of each node, and the seconds from when it begins to receive until it has its
    personal model.
    """
    with tempfile.TemporaryDirectory() as name:
        return _federate(asked, codec, Path(name), rate, delay)


def _federate(
    asked: argparse.Namespace, codec: str, folder: Path, rate: float, delay: float
) -> list[tuple[list[Span], float]]:
    command = [sys.executable, "-m", "edge_node"]
    plants = copy_images(asked.data, folder / "images", asked.nodes, asked.images)
    with start_broker(folder / "broker") as broker:
        links = [Link(broker.port, rate * 1e6 / 8, delay / 2000) for _ in plants]
        coordinate: Sequence[object] = (
            "coordinate",
            broker.url,
            "--nodes",
            asked.nodes,
            "--rounds",
            asked.rounds,
            "--method",
            asked.method,
            "--classes",
            ",".join(sorted(path.name for path in plants[0].iterdir())),
            "--model",
            "mobilenet_v2",
            "--weights",
            asked.weights,
            "--size",
            asked.size,
            "--codec",
            codec,
            "--state",
            folder / "coordinator",
        )
        joins: list[Sequence[object]] = [
            (
                "join",
                f"mqtt://127.0.0.1:{link.port}",
                "--name",
                plant.name,
                "--data",
                plant,
                "--state",
                folder / plant.name,
            )
            for link, plant in zip(links, plants, strict=True)
        ]
        processes = [
            subprocess.Popen(
                [*command, *map(str, each)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for each in (coordinate, *joins)
        ]
        codes = [process.wait() for process in processes]
    assert not any(codes), codes
    found = []
    for model in (folder / plant.name / "model" for plant in plants):
        spans = read_spans(model.parent, load_metadata(model).run)
        begin = min(span.begin for span in spans if span.activity == "receiving")
        found.append((spans, max(path.stat().st_mtime for path in model.iterdir()) - begin))
    return found


def measure(spans: Sequence[Span]) -> list[tuple[float, float, float]]:
    """Seconds of each round in which a node trained, moved tensors and trained nothing,
    and waited for others.
    """
    found = []
    for round_ in sorted({span.round for span in spans})[2:-1]:
        of = {span.activity: span for span in spans if span.round == round_}
        sending, refining = of["sending"], of.get("refining")
        beside = (
            max(0.0, min(sending.end, refining.end) - max(sending.begin, refining.begin))
            if refining
            else 0.0
        )
        seconds = {activity: span.end - span.begin for activity, span in of.items()}
        moving = seconds.get("receiving", 0.0) + seconds["sending"] - beside
        found.append((seconds["training"] + beside, moving, seconds.get("waiting", 0.0)))
    return found


def mean_seconds(nodes: Sequence[tuple[list[Span], float]]) -> float:
    """Seconds to a personal model, in the mean of the nodes."""
    return statistics.mean(seconds for _, seconds in nodes)


def main() -> None:
    """Print what each codec makes of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--codec", nargs="+", default=["int4", "none"])
    parser.add_argument("--method", default="afedcl_plus")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--images", type=int, default=20, help="of each class, at each node")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rate", type=float, default=20.0, help="megabits a second, each way")
    parser.add_argument("--delay", type=float, default=100.0, help="milliseconds there and back")
    parser.add_argument(
        "--runs", type=int, default=1, help="over the links and over none, in turns"
    )
    asked = parser.parse_args()
    print(
        f"{asked.nodes} nodes, links of {asked.rate:g} Mbit/s and {asked.delay:g} ms; medians, "
        "seconds a round"
    )
    for codec in asked.codec:
        measured, whole = list[tuple[float, float, float]](), list[tuple[float, float]]()
        for _ in range(asked.runs):
            linked = federate(asked, codec, asked.rate, asked.delay)
            bare = federate(asked, codec, math.inf, 0.0)
            measured += [each for spans, _ in linked for each in measure(spans)]
            whole.append((mean_seconds(linked), mean_seconds(bare)))
        training, moving, waiting = (
            statistics.median(column) for column in zip(*measured, strict=True)
        )
        share = statistics.median(100 * each[1] / sum(each) for each in measured)
        print(
            f"{codec:>5}: training {training:.2f}, moving tensors {moving:.2f} ({share:.1f} %), "
            f"waiting {waiting:.2f}"
        )
        for over, without in whole:
            print(
                f"       to the personal model {over:.1f}, without a link {without:.1f} "
                f"({over / without - 1:+.1%})"
            )


if __name__ == "__main__":
    main()
