"""Anomaly detection from good images alone: AUROC, false rejects, and what is found.

    python -m research.studies.good_only --pool report NEU=NEU-CLS/ X-SDD=X-SDD/
    python -m research.studies.good_only --table

A drawn surface is good without a defect; eight plants, six kinds of defect. Of a data set of
defects each class in turn is "good", and all others are strange: no such set has images without a
defect. Detectors see the good images of their size (20 or 50) alone; others of the same class or
plant, which are not among them, and strange ones judge them. A line of the file is a finished
detector, and is not run again.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from edge_node.extensions.anomaly.patch_density import (
    Judgement,
    PatchDensity,
    PlaceFeatures,
    cross_validate,
)
from research.runner.store import Records
from trainer.data import class_folders, drawn_surfaces
from trainer.data.partition import select_pool
from trainer.seeding import generator

SIZE, COUNTS, PLANTS = 128, (20, 50), 8  # pixels; good images; drawn plants
_FRESH, _STRANGE = 100, 20  # good images that judge, at most; strange ones of each kind
_SEEDS = {"tuning": 31, "report": 32}  # of drawn surfaces
STORE = Path("research/results/studies/good_only.jsonl")


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One detector, judged by images that it has not seen."""

    pool: str
    source: str  # a data set, or drawn
    good: str  # class or plant
    images: int  # good ones that it was made of
    fresh: int  # good ones that judged it
    auroc: float
    rejected: float  # share of these
    found: float  # share of strange images


class _Case(NamedTuple):
    source: str
    good: str
    ordinary: np.ndarray  # uint8 [n, S, S, 3], in random order
    strange: np.ndarray


def _drawn(pool: str) -> Iterator[_Case]:
    classes = drawn_surfaces.CLASSES
    nothing = classes.index("no_defect")
    for plant in range(PLANTS):
        count = max(COUNTS) + _FRESH
        kinds = [kind for kind in range(len(classes)) if kind != nothing]
        labels = np.repeat([nothing, *kinds], [count, *(_STRANGE for _ in kinds)])
        images = drawn_surfaces.draw_images(labels, SIZE, _SEEDS[pool], plant)
        yield _Case("drawn", f"plant {plant}", images[:count], images[count:])


def _one_class(pool: str, name: str, folder: Path) -> Iterator[_Case]:
    catalogue = select_pool(class_folders.scan(folder), pool)
    classes = sorted({entry.class_name for entry in catalogue.entries})
    loaded = class_folders.load(catalogue, classes, SIZE)
    order = generator(0, "good only", name).permutation(len(loaded.labels))
    images, labels = loaded.images[order], loaded.labels[order]
    for label, good in enumerate(classes):
        others = [
            images[labels == other][:_STRANGE] for other in range(len(classes)) if other != label
        ]
        yield _Case(
            name, good, images[labels == label][: max(COUNTS) + _FRESH], np.concatenate(others)
        )


def judge(network: PlaceFeatures, case: _Case, images: int) -> tuple[float, float, float]:
    """AUROC, share of fresh good images that are rejected, share of strange ones that are found."""
    good, fresh = case.ordinary[:images], case.ordinary[max(COUNTS) :]
    features, unseen, strange = (
        torch.stack(list(network.of_images(each))) for each in (good, fresh, case.strange)
    )
    judgement = Judgement.of(cross_validate(features, np.arange(images))[0])
    density = PatchDensity.fit(features)
    ordinary, others = (density(each)[1].numpy() for each in (unseen, strange))
    truths = np.repeat([0, 1], [len(ordinary), len(others)])
    auroc = float(roc_auc_score(truths, np.concatenate([ordinary, others])))
    return auroc, float(judgement.rejects(ordinary).mean()), float(judgement.rejects(others).mean())


def _table(found: list[Judged]) -> str:
    lines = [
        "| good images of | n | detectors | AUROC % | good rejected % | strange found % |",
        "|---|---|---|---|---|---|",
    ]
    for source in dict.fromkeys(each.source for each in found):
        for images in COUNTS:
            some = [each for each in found if (each.source, each.images) == (source, images)]
            shares = [
                [100 * getattr(each, name) for each in some]
                for name in ("auroc", "rejected", "found")
            ]
            figures = " | ".join(
                f"{np.mean(each):.1f} ± {np.std(each, ddof=1):.1f}" for each in shares
            )
            lines.append(f"| {source} | {images} | {len(some)} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or print the table of the report pool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--pool", choices=("tuning", "report"), default="tuning")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    records = Records(STORE, Judged)
    if arguments.table:
        print(_table([each for each in records if each.pool == arguments.pool]))
        return
    torch.set_num_threads(1)
    done = {(each.pool, each.source, each.good, each.images) for each in records}
    network = PlaceFeatures()
    cases = [_drawn(arguments.pool)]
    for name, folder in (given.split("=", 1) for given in arguments.sets):
        cases.append(_one_class(arguments.pool, name, Path(folder)))
    for case in (each for source in cases for each in source):
        for images in COUNTS:
            fresh = len(case.ordinary) - max(COUNTS)
            if fresh < 10 or (arguments.pool, case.source, case.good, images) in done:
                continue
            auroc, rejected, found = judge(network, case, images)
            records.add(
                Judged(
                    pool=arguments.pool,
                    source=case.source,
                    good=case.good,
                    images=images,
                    fresh=fresh,
                    auroc=auroc,
                    rejected=rejected,
                    found=found,
                )
            )


if __name__ == "__main__":
    main()
