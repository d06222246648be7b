"""Milliseconds an image of backbones beside one another.

    python -m benchmarks.backbones mobilenet_v2 efficientnet_lite0 --size 128

All take turns on one thread, at the size that a federation takes for each unless --size says
otherwise: the exported graph in fp32 and int8, one image at a time as the line runs it; frozen
features of 16 images as the trainer computes them; a training step of 8. Weights are those of the
package, or drawn. The tenth percentile is what they take where nothing else disturbs them; ratios
are to the first.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.texture_serving import graphs
from export.parity import open_session
from trainer.models.catalogue import DEFAULT_SIZE, SHIPPED
from trainer.models.initial_weights import initial_encoder
from trainer.models.named_tensors import is_trainable
from trainer.models.network import Network, to_tensors

_WARM_UP = 3


def calls(model: str, size: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """What is timed, and of how many images."""
    image = np.random.default_rng(0).integers(0, 256, (1, size, size, 3), np.uint8)
    weights = SHIPPED[model].weights if model in SHIPPED else "none"
    sessions = {
        precision: open_session(graph) for precision, graph in graphs(model, weights, size).items()
    }
    network, tensors = Network(model, 2), to_tensors(initial_encoder(model, weights, 0))
    frozen, trained = torch.randn(16, 3, size, size), torch.randn(8, 3, size, size)
    moving = {
        name: value.clone().requires_grad_(is_trainable(name)) for name, value in tensors.items()
    }

    def features() -> None:
        with torch.no_grad():
            network.encode(tensors, frozen)

    def step() -> None:
        network.encode(moving, trained).sum().backward()  # type: ignore[no-untyped-call]

    return {
        **{
            name: (1, partial(each.run, ["probabilities"], {"image": image}))
            for name, each in sessions.items()
        },
        "features": (len(frozen), features),
        "training": (len(trained), step),
    }


def main() -> None:
    """Print a JSON line for each kind of work and model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--size", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    made = {model: calls(model, asked.size or DEFAULT_SIZE[model]) for model in asked.models}
    for what in made[asked.models[0]]:
        times: dict[str, list[float]] = {model: [] for model in asked.models}
        for turn in range(_WARM_UP + asked.runs):
            for model in asked.models:
                images, call = made[model][what]
                start = time.perf_counter()
                call()
                if turn >= _WARM_UP:
                    times[model].append((time.perf_counter() - start) * 1000 / images)
        first = np.array(times[asked.models[0]])
        for model, found in times.items():
            p10, p50 = np.quantile(found, (0.1, 0.5)).round(2).tolist()
            ratio = round(float(np.median(np.array(found) / first)), 2)
            print(
                json.dumps(
                    {"what": what, "model": model, "p10 ms": p10, "p50 ms": p50, "ratio": ratio}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
