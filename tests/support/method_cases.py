"""Every method with its options, as a case; small federations to run them on,
and comparison of their tensors.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from broker_config.protocol.messages import Spec
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation.server.spec import Request, draft, suited_model, trains
from trainer.federation.simulation import SimulationResult, simulate
from trainer.methods import METHODS, Entry
from trainer.methods.base import MODEL, OneStage
from trainer.methods.fedavg import fedavg
from trainer.models.named_tensors import Arrays

CLASSES = ("scratches", "patches", "inclusion")
ON_ANY_MODEL = tuple(name for name in METHODS if suited_model(name, {}) == MODEL)
"""Methods that come with no network of their own."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "afedcl": ("afedcl", {}),
    "afedcl, carried over": ("afedcl", {"start": "carry"}),
    "afedcl, alternating": (
        "afedcl",
        {"play": "alternating", "report": "evaluation", "deploy": "final"},
    ),
    "afedcl, images count": ("afedcl", {"weights": "images"}),
    "afedcl, without fusion": ("afedcl", {"fusion": "none", "weights": "equal"}),
    **{name: (name, {}) for name in ON_ANY_MODEL if name != "afedcl"},
}


def register_method_with_model(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a method known by its name, which is returned, that comes with a network of its own."""
    entry = Entry(OneStage, lambda *asked: fedavg(*asked)._replace(model="small"))
    monkeypatch.setitem(METHODS, "with_model", entry)
    return "with_model"


def slow_except(quick: Iterable[str], names: Iterable[str] = ON_ANY_MODEL) -> list[Any]:
    """Parameters of a test that takes seconds for each name;
    `make slow` runs all but the quick ones.
    """
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def images(seed: int, count: int = 6) -> LabelledImages:
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 2 + seed % 2  # two of the three classes
    pixels = random.integers(0, 120, (count, 16, 16, 3)) + 60 * labels[:, None, None, None]
    digests = tuple(f"{seed:032x}{index:032x}" for index in range(count))
    return LabelledImages(
        pixels.astype(np.uint8), labels.astype(np.int64), digests, tuple(map(Path, digests))
    )


def shares(nodes: int = 3) -> dict[str, Images]:
    return {f"plant-{k}": Images(images(k), images(k + 100)) for k in range(1, nodes + 1)}


def drafted(case: str, seed: int = 0, **training: Any) -> tuple[Spec, Arrays]:
    method, options = CASES[case]
    request = Request(
        method=method, options=options, model="small", size=16, seed=seed, training=training
    )
    request = request._replace(rounds=2) if trains(request) else request
    return draft(request, federation="test", classes=CLASSES, nodes=3)


@functools.cache
def one_round(case: str) -> SimulationResult:
    spec, broadcast = drafted(case)
    return simulate(msgspec.structs.replace(spec, rounds=1), broadcast, shares())


def equal(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        one[name].tobytes() == other[name].tobytes() for name in one
    )
