"""Pace of a vertical federation: how far a round may move, and how many it takes;
the defaults of `vfl coordinate`.

    python -m research.studies.vfl_pace

On products of drawn stations, one after another as in a plant: accuracy beyond always the most
frequent class on 1,500 products that come after the last round, for rounds of different chunks,
steps and local iterations.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from broker_config.protocol.errors import EdgeNodeError
from edge_node.extensions.vfl.drawn_products import DrawnStations
from edge_node.extensions.vfl.messages import Recipe, VflSpec, Window
from edge_node.extensions.vfl.simulation import Simulation, Stream, simulate

_SEEDS = (101, 102, 103)
_START, _HELD_OUT = 1000, 1500  # products


class _Line(NamedTuple):
    """Products of a drawn line."""

    name: str
    stations: int
    products: int
    rare: bool = False  # one class against all others


_LINES = (
    _Line("3 stations", 3, 5000),
    _Line("6 stations", 6, 5000),
    _Line("3 stations, 2,000 products", 3, 2000),
    _Line("3 stations, one class or not", 3, 5000, rare=True),
)


class _Pace(NamedTuple):
    """How rounds go."""

    chunk: int = 100
    eta: float = 0.2
    iterations: int = 2
    batches: int = 1


_PACES = (
    *(_Pace(chunk=chunk) for chunk in (100, 50, 25, 10)),
    *(_Pace(eta=eta) for eta in (0.1, 0.3, 0.5, 1.0)),
    *(_Pace(eta=eta, iterations=5) for eta in (0.08, 0.2, 0.5)),
    *(_Pace(eta=eta, batches=32) for eta in (0.00625, 0.03)),
    *(_Pace(eta=eta, chunk=25) for eta in (0.1, 0.3)),
)


def _draw(line: _Line, seed: int) -> tuple[Stream, Stream]:
    """What sensors learn from, scaled by its first round's set, and what comes after it."""
    drawn = DrawnStations(line.stations, seed).draw(0, line.products + _HELD_OUT)
    samples = [
        torch.tensor((rows - rows[:_START].mean(0)) / rows[:_START].std(0), dtype=torch.float32)[
            ..., None
        ]
        for rows in drawn.rows
    ]
    labels = torch.from_numpy(drawn.labels)
    if line.rare:
        labels = (labels == torch.bincount(labels).argmin()).long()
    parts = slice(0, line.products), slice(line.products, None)
    learnt, held_out = (
        Stream(tuple(each[part] for each in samples), labels[part]) for part in parts
    )
    return learnt, held_out


def _gain(line: _Line, pace: _Pace, seed: int) -> float | None:
    """Points of accuracy beyond always the most frequent class; None if it diverged."""
    learnt, held_out = _draw(line, seed)
    spec = VflSpec(
        federation="pace",
        run="0" * 16,
        software="",
        sensors=tuple(f"sensor-{number}" for number in range(line.stations)),
        network="dense",
        classes=tuple(map(str, range(int(learnt.labels.max()) + 1))),
        window=Window(start=_START, chunk=pace.chunk),
        recipe=Recipe(eta=pace.eta, batches=pace.batches),
        seed=seed,
    )
    simulation = Simulation(spec, learnt)
    rounds = 1 + (line.products - _START) // pace.chunk
    try:
        for _ in simulate(simulation, rounds, lambda _: [pace.iterations] * line.stations):
            pass
        right = simulation.predict(held_out.samples).argmax(1) == held_out.labels
    except EdgeNodeError:
        return None
    return 100 * (
        _share(right) - _share(held_out.labels == torch.bincount(held_out.labels).argmax())
    )


def _share(which: Tensor) -> float:
    return which.double().mean().item()


def _rows() -> Iterator[list[str]]:
    for pace in track(_PACES, "learning", console=Console(stderr=True)):
        moved = pace.eta * pace.iterations * pace.batches
        row = [
            str(pace.chunk),
            f"{pace.eta:g}",
            str(pace.iterations),
            str(pace.batches),
            f"{moved:.2g}",
        ]
        for line in _LINES:
            gains = [_gain(line, pace, seed) for seed in _SEEDS]
            row.append(", ".join("diverged" if each is None else f"{each:.1f}" for each in gains))
        yield row


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table(
        "chunk", "step", "iterations", "batches", "a round", *(line.name for line in _LINES)
    )
    for row in _rows():
        table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
