"""Cost of a round to a plant with five images, by method: processor time on one core,
and bytes that it sends.

    python -m benchmarks.rounds_of_methods --weights mobilenet_v2.safetensors

Six epochs on drawn images of 64 px. A round of sums is one without training. Ratios are of one run.
"""

import argparse
import time
from statistics import median

import msgspec
import numpy as np
import torch

from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import is_statistics_round
from trainer.data import drawn_surfaces
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation.server.spec import Request, draft
from trainer.methods import METHODS
from trainer.models.named_tensors import Arrays
from trainer.training.participant import Participant

IMAGES, SIZE, ROUNDS = 5, 64, 3
ASKED = ("local", "fedavg", "fedper", "fedrep", "fedala", "afedcl", "gaussian", "afedcl_plus")
BASE = "fedavg"


def measure(
    spec: Spec, broadcast: Arrays, images: LabelledImages
) -> dict[str, tuple[float, float]]:
    """Median processor seconds and megabytes sent of rounds of training and of sums."""
    participant = Participant(spec, "plant", Images(images, None))
    state, found = participant.start(broadcast), dict[str, list[tuple[float, float]]]()
    for round_ in range(1, spec.rounds + 1):
        started = time.process_time()
        state, contributed, _ = participant.contribute(state, broadcast, round_)
        state, _ = participant.refine(state, broadcast, round_)
        size = sum(value.nbytes for value in contributed.tensors.values()) / 1e6
        kind = "sums" if is_statistics_round(spec, round_) else "training"
        found.setdefault(kind, []).append((time.process_time() - started, size))
    return {
        kind: (median(seconds for seconds, _ in each), each[0][1]) for kind, each in found.items()
    }


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", required=True, help="ImageNet's MobileNetV2")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    classes = drawn_surfaces.CLASSES[:3]
    random = np.random.default_rng(0)
    images = LabelledImages(
        random.integers(0, 255, (IMAGES, SIZE, SIZE, 3), np.uint8),
        np.arange(IMAGES) % 3,
        ("",) * IMAGES,
        (),
    )
    rows = {}
    for name in ASKED:
        options = (
            {"epochs": 6}
            if "epochs" in {field.name for field in msgspec.structs.fields(METHODS[name].options)}
            else {}
        )
        rounds = 1 if name == "gaussian" else ROUNDS
        request = Request(name, options, "mobilenet_v2", asked.weights, SIZE, rounds=rounds)
        rows[name] = measure(*draft(request, federation="rounds", classes=classes, nodes=5), images)
    base = rows[BASE]["training"][0]
    print("| method | round of | seconds | over FedAvg's | MB sent |\n|---|---|---|---|---|")
    for name, kinds in rows.items():
        for kind, (seconds, size) in kinds.items():
            print(f"| `{name}` | {kind} | {seconds:.2f} | {seconds / base:.2f} | {size:.1f} |")


if __name__ == "__main__":
    main()
