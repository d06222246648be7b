"""Nodes a second of a simulated federation: a bare PyTorch loop,
the plain engine and the batched one, in one run.

    python -m benchmarks.simulation_speed --nodes 5 20 --repetitions 3

The bare loop is what a researcher would write: torchvision's module, a copy for each node, Adam as
it comes, the same images, batches, augmentation and epochs, FedAvg by averaging state dicts. All
take turns, so that another load on the machine meets each; ratios are of the same turn.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from broker_config.protocol.messages import Spec
from trainer.data.class_folders import Images, LabelledImages
from trainer.data.training_set import Augmentation, TrainingSet, augment
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import Engine, simulate
from trainer.models.named_tensors import Arrays
from trainer.models.torchvision_import import torchvision_models
from trainer.training.engine import draw_batches

CLASSES = ("a", "b", "c")
RATIOS = (("plain", "bare"), ("batched", "bare"), ("afedcl batched", "afedcl plain"))


class Job(NamedTuple):
    """What all do."""

    spec: Spec
    broadcast: Arrays
    images: dict[str, Images]


def job(method: str, nodes: int, samples: int, rounds: int, model: str, size: int) -> Job:
    """Drawn images: time depends on sizes alone.

    One image a node is held out, and judged after the last round.
    """
    request = Request(method=method, model=model, weights="none", size=size, rounds=rounds)
    request = request._replace(
        training={"learning_rate": 2e-4, "batch_norm": "eval"}, aggregate="mean", codec="none"
    )
    spec, broadcast = draft(request, federation="benchmark", classes=CLASSES, nodes=nodes)
    random = np.random.default_rng(0)

    def drawn(count: int) -> LabelledImages:
        pixels = random.integers(0, 256, (count, size, size, 3)).astype(np.uint8)
        named = tuple(random.bytes(32).hex() for _ in range(count))
        return LabelledImages(
            pixels, np.arange(count) % len(CLASSES), named, tuple(map(Path, named))
        )

    return Job(
        spec, broadcast, {f"plant-{k}": Images(drawn(samples), drawn(1)) for k in range(nodes)}
    )


def bare(work: Job, device: str) -> None:
    """FedAvg without us. Each node keeps its optimiser from round to round, as ours do."""
    spec, random = work.spec, torch.Generator().manual_seed(0)
    average = getattr(torchvision_models(), spec.model)(num_classes=len(CLASSES)).to(device).eval()
    models = {name: copy.deepcopy(average) for name in work.images}
    optimisers = {
        name: torch.optim.Adam(m.parameters(), lr=spec.training.learning_rate)
        for name, m in models.items()
    }
    data = {
        name: TrainingSet.of(own.train, spec.preprocessing, device)
        for name, own in work.images.items()
    }
    for _ in range(spec.rounds):
        for name, model in models.items():
            model.load_state_dict(average.state_dict())
            own = data[name]
            for _ in range(spec.training.local_epochs):
                for index in draw_batches(len(own.labels), spec.training.batch_size, random):
                    images = augment(
                        own.images[index].float() / 255, Augmentation.draw(len(index), random)
                    )
                    loss = functional.cross_entropy(
                        model((images - own.mean) / own.std), own.labels[index]
                    )
                    optimisers[name].zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimisers[name].step()
                    loss.item()
        states = [model.state_dict() for model in models.values()]
        average.load_state_dict(
            {key: sum(s[key] for s in states) / len(states) for key in states[0]}
        )
    with torch.no_grad():
        for each in work.images.values():
            test = each.test
            assert test is not None
            average(
                TrainingSet.of(test, spec.preprocessing, device).network_input(slice(None))
            ).argmax(1).tolist()


def seconds(run: Callable[[], object], device: str) -> float:
    """Wall time."""
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def compare(nodes: int, asked: argparse.Namespace) -> dict[str, list[float]]:
    """Nodes a second and round of each, by repetition."""

    def make(method: str) -> Job:
        return job(method, nodes, asked.samples, asked.rounds, asked.model, asked.size)

    fedavg, afedcl = make("fedavg"), make("afedcl")
    plain, batched = Engine("plain", asked.device), Engine("batched", asked.device)
    contestants: dict[str, Callable[[], object]] = {
        "bare": lambda: bare(fedavg, asked.device),
        "plain": lambda: simulate(*fedavg, engine=plain, evaluate_every=asked.rounds),
        "batched": lambda: simulate(*fedavg, engine=batched, evaluate_every=asked.rounds),
        "afedcl plain": lambda: simulate(*afedcl, engine=plain, evaluate_every=asked.rounds),
        "afedcl batched": lambda: simulate(*afedcl, engine=batched, evaluate_every=asked.rounds),
    }
    contestants = {
        name: run for name, run in contestants.items() if not asked.only or name in asked.only
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(asked.repetitions + 1):
        for name, run in contestants.items():
            rate = nodes * asked.rounds / seconds(run, asked.device)
            if repetition:  # the first warms up
                rates[name].append(rate)
    return rates


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in figures.items()}


def result(nodes: int, rates: dict[str, list[float]]) -> dict[str, object]:
    """Of one number of nodes."""
    ratios = {
        f"{one} / {other}": spread([a / b for a, b in zip(rates[one], rates[other], strict=True)])
        for one, other in RATIOS
        if one in rates and other in rates
    }
    return {
        "nodes": nodes,
        "nodes_per_second": {name: spread(v) for name, v in rates.items()},
        "ratios": ratios,
    }


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[5, 20, 100])
    parser.add_argument("--size", type=int, default=64, help="pixels")
    parser.add_argument("--samples", type=int, default=10, help="training images of each node")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--model", choices=("mobilenet_v2", "resnet18", "resnet50"), default="mobilenet_v2"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--only", nargs="+", help="of bare, plain, batched, 'afedcl plain', 'afedcl batched'"
    )
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for nodes in asked.nodes:
        found = result(nodes, compare(nodes, asked))
        if asked.json:
            print(json.dumps(found), flush=True)
            continue
        print(
            f"{nodes} nodes, {asked.samples} images of {asked.size} px each, {asked.model}, "
            f"{asked.device}"
        )
        for part in ("nodes_per_second", "ratios"):
            for name, value in found[part].items():  # type: ignore[attr-defined]
                print(
                    f"  {name:32} {value['median']:8.2f}   ({value['min']:.2f} to "
                    f"{value['max']:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
