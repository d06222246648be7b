"""Finished cells as an experiment leaves them, with numbers that tests choose."""

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from broker_config.protocol.messages import Option, Training
from research.afedcl.cell import Cell, Finished, NodeResult, Setting
from trainer.seeding import generator

NEU = Setting(
    dataset="NEU-CLS",
    images="a" * 64,
    partition="disjoint",
    nodes=5,
    samples=10,
    classes_per_node=2,
)


def finished(
    method: str,
    accuracy: float,
    seed: int = 0,
    *,
    setting: Setting = NEU,
    options: Mapping[str, Option] | None = None,
    training: Training | None = None,
    model: str = "mobilenet_v2",
    history: dict[str, list[float | None]] | None = None,
    own: float | UnsetType = UNSET,
    everyone: float | UnsetType = UNSET,
) -> Finished:
    """A cell whose nodes all reached `accuracy` (and `own` and `everyone`);
    its F1 is two points lower.
    """
    cell = Cell(
        setting=setting,
        method=method,
        options=dict(options or {}),
        model=model,
        weights="5eed" * 16,
        size=96,
        training=training or Training(learning_rate=2e-4),
        rounds=4,
        seed=seed,
        torch="2.13.0",
    )
    node = NodeResult(
        name="",
        trained={},
        tested=60,
        accuracy=accuracy,
        f1=accuracy - 0.02,
        own=own,
        everyone=everyone,
        history=history or {},
    )
    nodes = [
        msgspec.structs.replace(node, name=f"plant-{number + 1}") for number in range(setting.nodes)
    ]
    return Finished(key=cell.key, cell=cell, nodes=nodes, seconds=1.0, machine="test")


def scattered(
    methods: Iterable[str], seeds: int, setting: Setting = NEU, **more: object
) -> list[Finished]:
    """Cells with accuracies drawn around 0.8, the same ones every time."""
    random = generator(
        0, "tests", *methods, setting.dataset, setting.partition, setting.samples, repr(more)
    )
    drawn = np.clip(random.normal(0.8, 0.05, (seeds, 12)), 0, 1)
    return [
        finished(method, float(drawn[seed, number]), seed, setting=setting, **more)  # type: ignore[arg-type]
        for seed in range(seeds)
        for number, method in enumerate(methods)
    ]


def curves(*, adversarial: bool, seed: int, rounds: int = 20) -> dict[str, list[float | None]]:
    """A history: L_D near ln 2 or falling to 0, accuracy measured every fifth round."""
    random = generator(seed, "curves", str(adversarial))
    falls = np.full(rounds, 0.69) if adversarial else 0.69 * np.exp(-np.arange(rounds) / 4)
    losses = [float(value) for value in np.abs(falls + random.normal(0, 0.03, rounds))]
    shares = [
        float(value)
        for value in 0.5
        + 0.3 * (1 - np.exp(-np.arange(rounds) / 6))
        + random.normal(0, 0.02, rounds)
    ]
    measured = [value if (number + 1) % 5 == 0 else None for number, value in enumerate(shares)]
    weights = [0.5 - 0.2 * loss for loss in losses]
    return {"L_D": [*losses], "A_k": [*weights], "accuracy": measured}


def answering(cell: Finished, labels: Iterable[int], log_probabilities: np.ndarray) -> Finished:
    """The cell, as if each node's held-out images had these labels and its model these outputs,
    [images, classes].
    """
    held_out = np.array([*labels], np.uint8)
    outputs = log_probabilities.astype(np.float16).tobytes()
    nodes = [
        msgspec.structs.replace(
            node, tested=len(held_out), labels=held_out.tobytes(), log_probabilities=outputs
        )
        for node in cell.nodes
    ]
    return msgspec.structs.replace(cell, nodes=nodes)
