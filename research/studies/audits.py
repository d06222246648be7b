"""Audits of methods: what attacks tell of a plant's images, open, masked and private.

    python -m research.studies.audits --data NEU-CLS --out research/results/studies/audits.jsonl
    python -m research.studies.audits --table --out research/results/studies/audits.jsonl

A plant has images of three of the data set's classes, so many of each, of the report pool; the
encoder begins with the weights that a coordinator takes by itself. What is finished is a line of
the file, and is not done again.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import torch

from edge_node.extensions.audit.audit import Audit, audit
from edge_node.extensions.audit.exposure import MEANINGS, MODES, SEEN
from research.runner.store import Records
from trainer import progress
from trainer.data import class_folders
from trainer.data.class_folders import Catalogue, Images
from trainer.data.partition import select_pool
from trainer.federation.server.spec import Request, draft
from trainer.seeding import generator

METHODS = ("gaussian", "fedavg", "afedcl", "afedcl_plus")
CLASSES, NODES = 3, 5


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One audit."""

    method: str
    model: str
    size: int
    each: int  # images of a class
    seed: int


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line in the file."""

    asked: Asked
    found: Audit


def run(asked: Asked, folder: Path) -> Line:
    """Draw the plant's images by the seed, and audit a federation."""
    catalogue = select_pool(class_folders.scan(folder), "report")
    random = generator(asked.seed, "audits")
    entries = []
    for name in random.choice(catalogue.classes, CLASSES, replace=False):
        some = [entry for entry in catalogue.entries if entry.class_name == name]
        entries += [some[place] for place in random.permutation(len(some))[: asked.each]]
    drawn = Catalogue(tuple(sorted(entries, key=lambda entry: entry.digest)))
    request = Request(asked.method, model=asked.model, size=asked.size, seed=asked.seed)
    drafted, _ = draft(request, federation="audited", classes=catalogue.classes, nodes=NODES)
    spec = msgspec.structs.replace(drafted, run=f"{asked.seed:016x}")  # noise depends on it
    images = class_folders.load(drawn, spec.classes, asked.size)
    return Line(
        asked=asked,
        found=audit(
            spec, Images(images, None), progress.ignore, asked.seed, is_thorough=True
        ).audit,
    )


def table(lines: Sequence[Line]) -> str:
    """Markdown: by what is seen, the worst attack's share of what there is to tell,
    mean and deviation over seeds.
    """
    groups: dict[Asked, list[Audit]] = defaultdict(list)
    for line in lines:
        groups[msgspec.structs.replace(line.asked, seed=0)].append(line.found)
    rows = [["method", "images sent", "seen", "what", *MODES], ["---"] * (4 + len(MODES))]
    for asked, audits in groups.items():
        for seen, what in product(SEEN, MEANINGS):
            cells = []
            for mode in MODES:
                told = [
                    max(each.told for each in some)
                    for found in audits
                    for each_mode in found.modes
                    if each_mode.mode == mode
                    and (
                        some := [
                            each
                            for each in each_mode.exposures
                            if (each.seen, each.what) == (seen, what)
                        ]
                    )
                ]
                cells.append(
                    f"{100 * np.mean(told):.0f} ± {100 * np.std(told, ddof=1):.0f}"
                    if len(told) > 1
                    else "–"
                )
            if any(cell != "–" for cell in cells):
                rows.append([asked.method, str(audits[0].sent), SEEN[seen], what, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Audit what is not in the file yet, or print the table of what is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of class folders")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--model", default="mobilenet_v2")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--each", nargs="+", type=int, default=[10, 40])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("research/results/studies/audits.jsonl"))
    parser.add_argument(
        "--table", action="store_true", help="print what the file holds, as Markdown"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(given.out, Line)
    if given.table:
        print(table(list(records)))
        return
    finished = {line.asked for line in records}
    for seed, each, method in product(given.seeds, given.each, given.methods):
        asked = Asked(method=method, model=given.model, size=given.size, each=each, seed=seed)
        if asked not in finished:
            records.add(run(asked, given.data))
            print(asked, flush=True)


if __name__ == "__main__":
    main()
