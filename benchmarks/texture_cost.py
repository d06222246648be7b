"""Cost of texture networks: `python -m benchmarks.texture_cost [MODEL ...] [--repetitions 5]
[--json]`.

Numbers held, and those of them in the frozen stem; multiply-adds of one image, in convolutions and
matrix products, attention's among them (FLOPs are twice as many); and milliseconds on one thread:
an image alone through the whole encoder, and an image's share of a training step (batches of 32,
Adam, the stem's maps kept) of small networks. The paper prints 24.6 million parameters and 4.51
GFLOPs for FedTFI, which its depth of 10 and width of 1024 contradict.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainer.models import backbones
from trainer.models.catalogue import ONLY_SIZE
from trainer.models.named_tensors import add_prefix, is_frozen, is_trainable
from trainer.models.network import Network, Tensors

_BATCH = 32


class Cost(NamedTuple):
    """Of one network."""

    model: str
    size: int  # pixels of an image's side
    values: int
    frozen: int
    multiply_adds: int  # an image
    forward_ms: float  # an image, alone
    training_ms: float | None  # an image, in a batch


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(ONLY_SIZE))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.json:
        print(
            "| model | pixels | parameters | of them frozen | multiply-adds | ms an image | ms "
            "an image, training |"
        )
        print("|---|---|---|---|---|---|---|")
    for model in options.models:
        cost = measure(model, options.repetitions)
        print(json.dumps(cost._asdict()) if options.json else _row(cost), flush=True)


def measure(model: str, repetitions: int) -> Cost:
    """The cost of a preset; medians."""
    size = ONLY_SIZE[model]
    with torch.device("meta"):
        structure, image = backbones.build(model).eval(), torch.empty(1, 3, size, size)
    with FlopCounterMode(display=False) as counted:
        structure(image)
    shapes = {name: value.numel() for name, value in structure.state_dict().items()}
    tensors = add_prefix("encoder", backbones.build(model).state_dict())
    network, images = Network(model, 2), torch.randn(_BATCH, 3, size, size)

    def forward() -> None:
        with torch.no_grad():
            network.encode(tensors, network.apply_stem(tensors, images[:1]))

    training = None
    if model.endswith("_small"):
        training = (
            _milliseconds(_step(network, tensors, network.apply_stem(tensors, images)), repetitions)
            / _BATCH
        )
    return Cost(
        model=model,
        size=size,
        values=sum(shapes.values()),
        frozen=sum(count for name, count in shapes.items() if is_frozen(name)),
        multiply_adds=counted.get_total_flops() // 2,
        forward_ms=_milliseconds(forward, repetitions),
        training_ms=training,
    )


def _step(network: Network, tensors: Tensors, seen: Tensor) -> Callable[[], None]:
    tensors = {
        name: value.clone().requires_grad_(is_trainable(name)) for name, value in tensors.items()
    }
    moved = [value for value in tensors.values() if value.requires_grad]
    optimiser = torch.optim.Adam(moved, fused=True)

    def step() -> None:
        loss = network.encode(tensors, seen).square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward(inputs=moved)  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def _milliseconds(work: Callable[[], None], repetitions: int) -> float:
    """Of processor time, after one run that is not counted."""
    work()
    taken = []
    for _ in range(repetitions):
        started = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - started))
    return statistics.median(taken)


def _row(cost: Cost) -> str:
    training = "" if cost.training_ms is None else f"{cost.training_ms:.1f}"
    return (
        f"| {cost.model} | {cost.size} | {cost.values / 1e6:.2f} M | {cost.frozen / 1e6:.2f} M "
        f"| {cost.multiply_adds / 1e9:.2f} G | {cost.forward_ms:.0f} | {training} |"
    )


if __name__ == "__main__":
    main()
