"""The data sets as sources that see the same classes differently: cloth in several pieces,
steel of two plants.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from broker_config.protocol.errors import UsageError
from trainer.data.class_folders import Catalogue, LabelledImages, merge, scan_sources

# KTH-TIPS2-a: folders of each source
_PIECES = (("sample_a", "sample_b"), ("sample_c", "sample_d"))
_DEFECTS = {  # X-SDD's names of what NEU-CLS has too
    "slag_inclusion": "inclusion",
    "surface_scratch": "scratches",
    "oxide_scale_of_plate_system": "rolled-in_scale",
    "oxide_scale_of_temperature_system": "rolled-in_scale",
}


class Inputs(NamedTuple):
    """What some cells need; a weights file must have the same path on other machines."""

    sources: Mapping[str, Sequence[Catalogue]]  # by `Setting.images`
    images: Mapping[tuple[str, int], LabelledImages]  # of all sources, by that and the size
    weights: Mapping[str, str]  # `none`, `imagenet` or a file, by `Cell.weights`


def read(folders: Mapping[str, Path]) -> dict[str, tuple[Catalogue, ...]]:
    """The sources of each data set of which all folders are there.

    Raises:
        UsageError: one of a data set's folders is not given, or something is wrong with it.
    """
    wanted = {
        name: each
        for name, each in DATASETS.items()
        if any(folder in folders for folder in each.folders)
    }
    lacking = [
        folder for each in wanted.values() for folder in each.folders if folder not in folders
    ]
    if lacking:
        raise UsageError(
            "steel takes two sources, NEU-CLS and X-SDD",
            f"pass --data {lacking[0]}=FOLDER, too, or neither",
        )
    return {
        name: each.read([folders[folder] for folder in each.folders])
        for name, each in wanted.items()
    }


def digest(sources: Sequence[Catalogue]) -> str:
    """A digest of the images of sources, and of their classes."""
    lines = (
        f"{number} {entry.digest} {entry.class_name}\n"
        for number, source in enumerate(sources)
        for entry in source.entries
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _kth(folders: Sequence[Path]) -> tuple[Catalogue, ...]:
    pieces = _scan_pieces(folders)
    return merge(pieces[:2]), merge(pieces[2:])


def _other_pieces(folders: Sequence[Path]) -> tuple[Catalogue, ...]:
    first, second, third, fourth = _scan_pieces(folders)
    return first, third, second, fourth


def _scan_pieces(folders: Sequence[Path]) -> list[Catalogue]:
    (folder,) = folders
    names = [name for source in _PIECES for name in source]
    for name in names:
        if not (folder / name).is_dir():
            above = f", perhaps {folder.parent}" if folder.name in names else ""
            raise UsageError(
                f"the data set kth has no folder {folder / name}",
                f"pass the folder that holds {names[0]} to {names[-1]} as --data kth=FOLDER{above}",
            )
    return scan_sources([folder / name for name in names], {})


def _steel(folders: Sequence[Path]) -> tuple[Catalogue, ...]:
    matching = set(_DEFECTS.values())
    return tuple(
        Catalogue(tuple(entry for entry in source.entries if entry.class_name in matching))
        for source in scan_sources(folders, _DEFECTS)
    )


class Dataset(NamedTuple):
    """Folders that are read as sources."""

    title: str
    folders: tuple[str, ...]  # names for `--data`
    sources: tuple[str, ...]  # their titles
    read: Callable[[Sequence[Path]], tuple[Catalogue, ...]]
    # so many sources, the last ones, are held out whole: the others' in their order
    held_out: int = 0


DATASETS = {
    "kth": Dataset("KTH-TIPS2 fabrics", ("kth",), ("pieces a, b", "pieces c, d"), _kth),
    "pieces": Dataset(
        "KTH-TIPS2 fabrics, whole pieces held out",
        ("kth",),
        ("piece a", "piece c", "piece b, held out", "piece d, held out"),
        _other_pieces,
        held_out=2,
    ),
    "steel": Dataset("NEU-CLS and X-SDD", ("neu", "xsdd"), ("NEU-CLS", "X-SDD"), _steel),
}
FOLDERS = tuple(dict.fromkeys(folder for each in DATASETS.values() for folder in each.folders))
