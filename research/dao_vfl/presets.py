"""Presets: rounds, seeds, settings, and the choices that the paper leaves open."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from edge_node.extensions.vfl.messages import Channel, Denoising, Recipe, Window
from research.dao_vfl.data import SUBSETS
from research.dao_vfl.policies.learning_curve import CIFAR_10, FD002, FD002_MINIBATCH, Curve

Arrival = Literal["engines", "mixed"]
ETAS = (0.03, 0.1, 0.3)
"""Steps of gradient descent that are tried;
the paper's 0.01 hardly learns with one step an iteration.
"""
WORTH: dict[tuple[str, int], Curve] = {
    ("cmapss", 1): FD002,
    ("cmapss", 32): FD002_MINIBATCH,
    ("cifar10", 1): CIFAR_10,
}
"""What weighs accuracy in rewards, by data set and steps an iteration; fitted to runs,
so only where there are some.
"""


class Study(NamedTuple):
    """A data set in a preset."""

    network: str
    rounds: int
    every: int  # rounds from one measurement to the next
    seeds: int
    window: Window
    recipe: Recipe
    channel: Channel  # noise, where there is any
    denoising: Denoising
    # E_k of Fig. 4 with the same sum as `equal`, the second half of them HE
    unequal: tuple[tuple[int, ...], ...]
    most: int = 5  # E_max where a policy decides
    order: Arrival = "mixed"
    equal: int = 2  # E_k of every sensor (paper VII-F)

    @property
    def sensors(self) -> int:
        """K."""
        return len(self.unequal[0])


_C_MAPSS = Study(
    network="conv",
    rounds=100,
    every=5,
    seeds=5,
    window=Window(start=1000, chunk=100),
    recipe=Recipe(eta=0.1),  # of ETAS, on validation engines
    channel=Channel(levels=2),
    denoising=Denoising(rounds=40),
    unequal=((3, 1), (1, 3)),
)
# 64 steps a round on embeddings as received: everybody's curves jump
_MINIBATCH = _C_MAPSS._replace(
    seeds=10,
    recipe=Recipe(eta=0.01, batches=32),
    denoising=Denoising(rounds=40, learning_rate=3e-3, bottleneck=14),  # of four that were tried
)
_CIFAR_10 = Study(  # 10,000 images of 50,000, so that sets are smaller, too
    network="vgg_small",
    rounds=50,
    every=5,
    seeds=3,
    window=Window(start=1000, chunk=150, size=1000),
    recipe=Recipe(eta=0.1),  # of ETAS, on held-out images of the training file
    channel=Channel(levels=2),
    denoising=Denoising(rounds=20, learning_rate=3e-3),
    unequal=((5, 1, 1, 1), (1, 1, 1, 5)),
)

PRESETS: dict[str, Mapping[str, Study]] = {
    "quick": {
        **dict.fromkeys(SUBSETS, _C_MAPSS._replace(rounds=60, seeds=2)),
        "cifar10": _CIFAR_10._replace(rounds=20, seeds=1),
    },
    "cpu": {**dict.fromkeys(SUBSETS, _C_MAPSS), "cifar10": _CIFAR_10},
    "minibatch": {
        **dict.fromkeys(SUBSETS, _MINIBATCH),
        # twice as many steps diverge: four sensors overshoot together
        "cifar10": _CIFAR_10._replace(recipe=Recipe(eta=0.02, batches=8)),
    },
    "full": {  # as the paper: until no further chunk is whole; CIFAR-10 whole, for a fast machine
        **dict.fromkeys(SUBSETS, _C_MAPSS._replace(rounds=492, every=10)),
        "cifar10": _CIFAR_10._replace(
            network="vgg13", rounds=226, seeds=10, window=Window(start=5000, chunk=200, size=5000)
        ),
    },
}
