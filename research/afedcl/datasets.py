"""The data sets of the paper (Cui et al., 2024), by the names that `--data` takes."""

from typing import NamedTuple


class Dataset(NamedTuple):
    """Class folders that are given; where public ones are from is in `trainer/data/datasets/`."""

    name: str  # in tables and in stored cells
    classes_per_node: int  # of the disjoint partition, in the paper


DATASETS = {
    "neu": Dataset("NEU-CLS", 2),
    "xsdd": Dataset("X-SDD", 3),
    "gc10": Dataset("GC10-DET", 4),
}
