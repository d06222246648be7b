"""Transfer from drawn images to real ones: a network that never saw a photograph classifies
those of NEU-CLS.

    python -m research.studies.drawn_to_real NEU --model small --steps 3000 --seeds 0 1 2

trains on the drawn classes, six defects and none, and prints the accuracy on real images of the
six: with *no defect* among the answers, and without.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from broker_config.protocol.messages import Preprocessing
from research.pretraining.pretrain import Classifier, Plan, pretrain
from trainer.data import class_folders, partition
from trainer.data.drawn_surfaces import CLASSES
from trainer.data.training_set import TrainingSet


def judge(model: Classifier, images: class_folders.LabelledImages) -> np.ndarray:
    """Logits [n, classes] of the drawn classes."""
    ready = TrainingSet.of(images, Preprocessing(size=images.images.shape[1]))
    model.eval()
    with torch.no_grad():
        parts = [
            model(ready.network_input(slice(i, i + 64))) for i in range(0, len(images.labels), 64)
        ]
    return torch.cat(parts)[:, : len(CLASSES)].numpy()


def main() -> None:
    """Print a line for each seed, and the mean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="class folders of NEU-CLS")
    parser.add_argument("--model", default="small")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--size", type=int, default=64, help="pixels")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--pool", default="report", help="report, tuning or all")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    images = class_folders.load(
        partition.select_pool(class_folders.scan(asked.folder), asked.pool), CLASSES, asked.size
    )
    bare = CLASSES.index("no_defect")
    found = []
    for seed in asked.seeds:
        plan = Plan(
            asked.model,
            asked.steps,
            textures=0,
            defects=1.0,
            size=asked.size,
            late_size=asked.size,
            seed=seed,
        )
        with tempfile.TemporaryDirectory() as folder:
            logits = judge(pretrain(plan, Path(folder)), images)
        seven = np.mean(logits.argmax(1) == images.labels)
        logits[:, bare] = -np.inf
        found.append((100 * np.mean(logits.argmax(1) == images.labels), 100 * seven))
        print(
            f"seed {seed}: {found[-1][0]:.1f} % of {len(images.labels)}; {found[-1][1]:.1f} % "
            "with no_defect",
            flush=True,
        )
    mean, spread = np.mean(found, 0), np.std(found, 0, ddof=1)
    print(
        f"mean: {mean[0]:.1f} ± {spread[0]:.1f} %; with no_defect {mean[1]:.1f} ± {spread[1]:.1f} %"
    )


if __name__ == "__main__":
    main()
