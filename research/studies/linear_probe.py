"""Quality of initial weights before any federation: a linear probe on frozen features,
a few images a class.

    python -m research.studies.linear_probe NEU --weights surface imagenet none --size 64 128

prints the accuracy on all other images of the pool, mean and standard deviation over `--draws`
random choices of the training images. The probe is logistic regression with a small L2 penalty on
standardised features, the same for all.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from broker_config.protocol.messages import Preprocessing
from trainer.data import class_folders, partition
from trainer.data.training_set import TrainingSet
from trainer.models.initial_weights import initial_encoder
from trainer.models.network import Network, to_tensors
from trainer.seeding import generator

_PENALTY = 0.01


def features(model: str, weights: str, images: class_folders.LabelledImages) -> np.ndarray:
    """Features [n, F] of images by an untrained or pretrained encoder,
    BatchNorm on its stored statistics.
    """
    network, tensors = Network(model, 2), to_tensors(initial_encoder(model, weights, seed=0))
    ready = TrainingSet.of(images, Preprocessing(size=images.images.shape[1]))
    with torch.no_grad():
        parts = [
            network.encode(tensors, ready.network_input(slice(i, i + 64)))
            for i in range(0, len(images.labels), 64)
        ]
    return torch.cat(parts).numpy()


def probe(inputs: np.ndarray, labels: np.ndarray, shots: int, draw: int) -> float:
    """Accuracy in 0..1 on the images that are not among the `shots` of each class that train."""
    random = generator(draw, "probe")
    train = np.concatenate(
        [random.permutation(np.flatnonzero(labels == c))[:shots] for c in np.unique(labels)]
    )
    mean, spread = inputs[train].mean(0), inputs[train].std(0)
    scaled = torch.tensor((inputs - mean) / (spread + 1e-3 * spread.max() + 1e-9))
    known, classes = torch.tensor(labels), int(labels.max()) + 1
    weight = torch.zeros(classes, inputs.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=100)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = functional.cross_entropy(scaled[train] @ weight.T + bias, known[train])
        loss = loss + _PENALTY / 2 * (weight**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    held_out = np.setdiff1d(np.arange(len(labels)), train)
    answers = (scaled[held_out] @ weight.T + bias).argmax(1)
    return float((answers == known[held_out]).float().mean())


def main() -> None:
    """Print a line for each size and each kind of weights."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="class folders")
    parser.add_argument("--model", default="mobilenet_v2", help="backbone")
    parser.add_argument(
        "--weights", nargs="+", default=["surface", "none"], help="surface, imagenet, none or files"
    )
    parser.add_argument("--size", nargs="+", type=int, default=[64, 128], help="pixels")
    parser.add_argument("--shots", type=int, default=5, help="training images of each class")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--pool", default="report", help="report, tuning or all")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    catalogue = partition.select_pool(class_folders.scan(asked.folder), asked.pool)
    for size in asked.size:
        images = class_folders.load(catalogue, catalogue.classes, size)
        for weights in asked.weights:
            inputs = features(asked.model, weights, images)
            found = [
                100 * probe(inputs, images.labels, asked.shots, draw) for draw in range(asked.draws)
            ]
            print(
                f"{asked.folder.name}, {size} px, {asked.model}, {weights}: {np.mean(found):.1f} "
                f"± {np.std(found, ddof=1):.1f} % of {len(images.labels)} images less "
                f"{asked.shots} of each class",
                flush=True,
            )


if __name__ == "__main__":
    main()
