"""A plant's labelled images: a folder for each class.

Images are ordered by the SHA-256 of their bytes, so that names, file types and folder order never reach training.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from broker_config.errors import UsageError
from edge.images import SUFFIXES, ImageError, decode
from trainer.methods import nearest
from trainer.seeding import generator

_LISTED = 10  # files that an error names
_LEAST_PER_CLASS, _LEAST = 5, 20  # images, below which none are held out


class Entry(NamedTuple):
    """An image file, by its SHA-256."""

    path: Path
    class_name: str
    digest: str


class Catalogue(NamedTuple):
    """The images of a class-folder tree, ordered by digest, each once."""

    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()

    @property
    def classes(self) -> list[str]:
        """The classes that occur, in alphabetic order."""
        return sorted({entry.class_name for entry in self.entries})


class LabelledImages(NamedTuple):
    """Decoded images in the catalogue's order."""

    images: np.ndarray  # uint8 [n, S, S, 3]
    labels: np.ndarray  # int64 [n]
    digests: tuple[str, ...]
    paths: tuple[Path, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """class/file, for messages."""
        return tuple(f"{path.parent.name}/{path.name}" for path in self.paths)

    def take(self, index: np.ndarray) -> "LabelledImages":
        """The images at these positions."""
        return LabelledImages(
            self.images[index],
            self.labels[index],
            tuple(self.digests[i] for i in index),
            tuple(self.paths[i] for i in index),
        )


class Images(NamedTuple):
    """A node's images: those that train, and those held out, if it has enough of them."""

    train: LabelledImages
    test: LabelledImages | None


def scan(folder: Path) -> Catalogue:
    """Find and hash a plant's images.

    Byte-identical images of one class count once (a warning says so).

    Raises:
        UsageError: what is wrong with the folder, and what to do.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist",
            "pass a folder with one folder of images for each class",
        )
    entries: dict[str, Entry] = {}
    warnings, ignored = [], 0
    for path in sorted(path for path in folder.glob("*/*") if not _hidden(path)):
        if path.suffix.lower() not in SUFFIXES:
            ignored += path.is_file()
            continue
        entry = Entry(path, path.parent.name, _hash(path))
        twin = entries.setdefault(entry.digest, entry)
        if twin.class_name != entry.class_name:
            raise UsageError(
                f"{path} and {twin.path} are the same image in two classes",
                "remove it from the class where it is wrong",
            )
        if twin is not entry:
            warnings.append(f"{path} is the same image as {twin.path}; it counts once")
    if ignored:
        warnings.append(f"{ignored} file(s) in {folder} are not images and were ignored")
    loose = sum(path.suffix.lower() in SUFFIXES for path in folder.glob("*"))
    if not entries:
        raise UsageError(
            f"there are no class folders with images in {folder}",
            "put each class's images into a folder of its own, named like the class"
            if loose
            else f"pass a folder with one folder of images ({' '.join(SUFFIXES)}) for each class",
        )
    if loose:
        warnings.append(f"{loose} image(s) in {folder} are in no class folder and were ignored")
    return Catalogue(tuple(sorted(entries.values(), key=lambda entry: entry.digest)), tuple(warnings))


def _hidden(path: Path) -> bool:
    """Whether the file or its class folder is a system's or a tool's own."""
    return path.name.startswith(".") or path.parent.name.startswith(".")


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})", "make it readable, or remove it") from error


def load(catalogue: Catalogue, classes: Sequence[str], size: int) -> LabelledImages:
    """Decode the images to size x size; labels are positions in `classes`.

    Raises:
        UsageError: folders that are no class of the federation, or images that cannot be read; all are named.
    """
    for name in catalogue.classes:
        if name not in classes:
            raise UsageError(
                f"{name!r} is not a class of this federation, whose classes are {', '.join(classes)}",
                f"rename or remove the folder {name}; {nearest(name, classes)}",
            )
    images, broken = [], []
    for entry in catalogue.entries:
        try:
            images.append(decode(entry.path, size))
        except ImageError as error:
            broken.append(error.what)
    if broken:
        more = f"\n  and {len(broken) - _LISTED} more" if len(broken) > _LISTED else ""
        raise UsageError(
            f"{len(broken)} image(s) cannot be read:\n  " + "\n  ".join(broken[:_LISTED]) + more,
            "repair or remove these files",
        )
    return LabelledImages(
        np.stack(images),
        np.array([classes.index(entry.class_name) for entry in catalogue.entries], np.int64),
        tuple(entry.digest for entry in catalogue.entries),
        tuple(entry.path for entry in catalogue.entries),
    )


def check_disjoint(train: LabelledImages, test: LabelledImages) -> None:
    """Raise UsageError if an image is in both."""
    there = dict(zip(train.digests, train.names, strict=True))
    for digest, name in zip(test.digests, test.names, strict=True):
        if digest in there:
            raise UsageError(
                f"the held-out image {name} is also among the training images, as {there[digest]}",
                "remove it from one of the two folders",
            )


def split_holdout(images: LabelledImages, share: float, seed: int) -> tuple[LabelledImages, LabelledImages] | None:
    """Training and held-out images, a `share` of each class and at least one; None when there are too few for that."""
    counts = np.unique(images.labels, return_counts=True)[1]
    if len(images.labels) < _LEAST or counts.min() < _LEAST_PER_CLASS:
        return None
    held_out = [order[: max(1, round(share * len(order)))] for order in _by_class(images, seed)]
    test = np.sort(np.concatenate(held_out))
    return images.take(np.setdiff1d(np.arange(len(images.labels)), test)), images.take(test)


def folds(images: LabelledImages, count: int, seed: int) -> list[np.ndarray]:
    """Positions of `count` folds, each with about the same share of every class."""
    order = np.concatenate(list(_by_class(images, seed)))
    return [np.sort(order[start::count]) for start in range(count)]


def _by_class(images: LabelledImages, seed: int) -> Iterable[np.ndarray]:
    """The positions of each class's images, shuffled."""
    grouped: dict[int, list[int]] = defaultdict(list)
    for position, label in enumerate(images.labels):
        grouped[int(label)].append(position)
    random = generator(seed, "hold out")
    return [random.permutation(grouped[label]) for label in sorted(grouped)]
