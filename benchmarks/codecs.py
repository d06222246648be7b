"""Bytes, time and memory of coded contributions, as a federation's training makes them.

    python -m benchmarks.codecs --data NEU-CLS --weights mobilenet_v2_imagenet.safetensors --rounds
    3

FedAvg of five nodes with five images of three classes each, at 64 px. The codec codes what the
first node sends in a round, against the round's broadcast. Times are medians over rounds and
repetitions, of one thread; memory is what is allocated at the peak beyond the tensors.
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

from broker_config.protocol.codec import encode_tensors
from broker_config.protocol.messages import Spec, TensorSpec
from trainer.data import class_folders
from trainer.data.class_folders import Images
from trainer.data.partition import Scheme
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.federation.update_codec import RECOMMENDED, decode, encode
from trainer.models.named_tensors import Arrays
from trainer.training.participant import Contributed

REPETITIONS = 5


def contributions(asked: argparse.Namespace) -> list[tuple[Arrays, Arrays]]:
    """What the first node sends in each round, and the round's broadcast."""
    catalogue = class_folders.scan(asked.data)
    request = Request(
        "fedavg",
        model="mobilenet_v2",
        weights=asked.weights,
        size=64,
        rounds=asked.rounds,
        codec="none",
    )
    request = request._replace(training={"local_epochs": 6})
    spec, broadcast = draft(request, federation="benchmark", classes=catalogue.classes, nodes=5)
    found: list[tuple[Arrays, Arrays]] = []

    def keep(
        node: str,
        round_: int,  # noqa: ARG001
        sent: Contributed,
        received: Arrays,
    ) -> Contributed:
        if node == min(images):
            found.append((sent.tensors, received))
        return sent

    images = _images(spec, catalogue)
    simulate(spec, broadcast, images, tamper=keep)
    return found


def _images(spec: Spec, catalogue: class_folders.Catalogue) -> dict[str, Images]:
    shares = Scheme("disjoint", 5, 5, 0, {"classes_per_node": 3}).shares(catalogue)
    return {
        share.node: class_folders.load_both(
            share.train, share.test, spec.classes, spec.preprocessing.size
        )
        for share in shares
    }


def milliseconds(work: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def peak(work: Callable[[], object]) -> float:
    """MB that one call allocates at most."""
    tracemalloc.start()
    work()
    found = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    sent = contributions(parser.parse_args())
    print(
        "| codec | MB, round by round | encode, ms | decode, ms | peak, MB: encode, decode "
        "|\n|---|---|---|---|---|"
    )
    print(f"| none | {len(encode_tensors(sent[0][0])) / 1e6:.2f} | | | |")
    sizes, encoded, decoded, memory = (
        list[float](),
        list[float](),
        list[float](),
        list[tuple[float, float]](),
    )
    for tensors, held in sent:
        expected = {name: TensorSpec(array.shape, 0) for name, array in tensors.items()}
        code = partial(encode, tensors, held, tensors)
        blob = code()
        read = partial(decode, blob, expected, held)
        sizes.append(len(blob) / 1e6)
        encoded += [milliseconds(code) for _ in range(REPETITIONS)]
        decoded += [milliseconds(read) for _ in range(REPETITIONS)]
        memory.append((peak(code), peak(read)))
    times = f"{statistics.median(encoded):.0f} | {statistics.median(decoded):.0f}"
    most = ", ".join(f"{max(each):.0f}" for each in zip(*memory, strict=True))
    print(f"| {RECOMMENDED} | {', '.join(f'{size:.2f}' for size in sizes)} | {times} | {most} |")


if __name__ == "__main__":
    main()
