"""A plant's labelled images: a folder for each class.

Images are ordered by the SHA-256 of their bytes, so that names, file types and folder order never reach training.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from broker_config.protocol.errors import UsageError, nearest
from edge.inference.image_decoding import SUFFIXES, ImageError, Photo, read
from trainer.data.checks.findings import Finding, Severity, lines, listing, names, refuse
from trainer.training.seeding import generator

LEAST_PER_CLASS, LEAST = 5, 20  # images, below which none are held out


class Entry(NamedTuple):
    """An image file, by its SHA-256."""

    path: Path
    class_name: str
    digest: str


class Catalogue(NamedTuple):
    """The images of a class-folder tree, ordered by digest, each once."""

    entries: tuple[Entry, ...]
    findings: tuple[Finding, ...] = ()

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
    seen: np.ndarray | None = None  # float32 [n, ...]: what a frozen stem makes of them, where that is known

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
            None if self.seen is None else self.seen[index],
        )

    def among(self, catalogue: Catalogue) -> "LabelledImages":
        """Those that a catalogue has."""
        wanted = {entry.digest for entry in catalogue.entries}  # both are ordered by digest
        return self.take(np.flatnonzero([digest in wanted for digest in self.digests]))


class Images(NamedTuple):
    """A node's images: those that train, and those held out, if it has enough of them."""

    train: LabelledImages
    test: LabelledImages | None


def scan(folder: Path) -> Catalogue:
    """Find and hash a plant's images, as `survey` does.

    Raises:
        UsageError: what is wrong with the folder, and what to do.
    """
    catalogue = survey(folder)
    refuse(catalogue.findings)
    return catalogue


def scan_sources(folders: Sequence[Path], rename: Mapping[str, str]) -> list[Catalogue]:
    """Scan several sources of images, and give those classes the same name that are the same.

    Args:
        folders: each with a folder for each class.
        rename: from a source's name of a class to the common one.

    Raises:
        UsageError: what is wrong with a folder; no source has the class to rename; or sources differ about an image.
    """
    scanned = [scan(folder) for folder in folders]
    found = {name for source in scanned for name in source.classes}
    for name in rename:
        if name not in found:
            raise UsageError(f"there is no class {name!r} to rename", nearest(name, sorted(found)))
    renamed = [
        Catalogue(tuple(entry._replace(class_name=rename.get(entry.class_name, entry.class_name)) for entry in entries))
        for entries, _ in scanned
    ]
    _agree(renamed)
    return renamed


def _agree(sources: Sequence[Catalogue]) -> None:
    """Refuse an image that is of one class in one source and of another in another."""
    alike: dict[str, list[Entry]] = defaultdict(list)
    for source in sources:
        for entry in source.entries:
            alike[entry.digest].append(entry)
    differing = [entries for entries in alike.values() if len({entry.class_name for entry in entries}) > 1]
    if differing:
        refuse([in_two_classes([[entry.path for entry in entries] for entries in differing])])


def distinct(sources: Sequence[Catalogue]) -> list[Catalogue]:
    """The sources without those images that a source before them has."""
    seen: set[str] = set()
    kept = []
    for source in sources:
        kept.append(Catalogue(tuple(entry for entry in source.entries if entry.digest not in seen)))
        seen |= {entry.digest for entry in source.entries}
    return kept


def union(sources: Sequence[Catalogue]) -> Catalogue:
    """The images of all sources, each once."""
    entries = [entry for source in distinct(sources) for entry in source.entries]
    return Catalogue(tuple(sorted(entries, key=lambda entry: entry.digest)))


def survey(folder: Path) -> Catalogue:
    """Find and hash a plant's images, FOLDER/CLASS/FILE. What is wrong with them is among the catalogue's findings.

    Byte-identical images count once.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist",
            "pass a folder with one folder of images for each class",
        )
    alike: dict[str, list[Entry]] = defaultdict(list)
    broken: dict[Path, str] = {}
    for path in _images(folder, "*/*"):
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            broken[path] = f"{path} cannot be read: {error.strerror}"
        else:
            alike[digest].append(Entry(path, path.parent.name, digest))
    firsts = sorted((entries[0] for entries in alike.values()), key=lambda entry: entry.digest)
    found = [*_twins(list(alike.values())), *unreadable(broken), *_outside(folder, bool(firsts or broken))]
    return Catalogue(tuple(firsts), tuple(found))


def _images(folder: Path, pattern: str, *, hidden: bool = False) -> list[Path]:
    """The image files below the folder that fit a pattern; `hidden` are a system's or a tool's own."""
    return sorted(
        path for path in folder.glob(pattern) if path.suffix.lower() in SUFFIXES and _hidden(path, folder) == hidden
    )


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _twins(alike: Sequence[Sequence[Entry]]) -> Iterator[Finding]:
    """What to say of images [groups] that are the same, byte for byte."""
    groups = [[entry.path for entry in entries] for entries in alike if len(entries) > 1]
    across = [paths for paths in groups if len({path.parent for path in paths}) > 1]
    within = [paths for paths in groups if paths not in across]
    if across:
        yield in_two_classes(across)
    if within:
        yield Finding(
            "warning",
            "twice",
            f"{len(within)} image(s) are there more than once, and count once:{equal(within)}",
            "remove the copies",
            names(path for paths in within for path in paths),
        )


def in_two_classes(groups: Sequence[Sequence[Path]]) -> Finding:
    """That the images of each group are the same, but not of the same class."""
    return Finding(
        "error",
        "two classes",
        f"{len(groups)} image(s) are the same in two classes:{equal(groups)}",
        "remove each from the class where it is wrong",
        names(path for paths in groups for path in paths),
    )


def equal(groups: Sequence[Sequence[Path]]) -> str:
    """The groups of images that are the same, as text."""
    return lines([" = ".join(map(str, paths)) for paths in groups])


def unreadable(broken: Mapping[Path, str]) -> Iterator[Finding]:
    """That these images cannot be read, each with its reason."""
    if broken:
        text = f"{len(broken)} image(s) cannot be read:{lines(list(broken.values()))}"
        yield Finding("error", "unreadable", text, "repair or remove these files", names(broken))


def _outside(folder: Path, found: bool) -> Iterator[Finding]:
    """What to say of files that are no images of a class; an error if there is nothing else."""
    loose, deep = _images(folder, "*.*"), _images(folder, "*/*/**/*")
    if not found:
        remedy = f"pass a folder with one folder of images ({' '.join(SUFFIXES)}) for each class"
        if loose:
            remedy = "put each class's images into a folder of its own, named like the class"
        elif deep:
            remedy = f"pass the folder whose folders are the classes, perhaps {deep[0].parent.parent}"
        yield Finding("error", "no images", f"there are no class folders with images in {folder}", remedy)
        return
    files = [path for path in sorted(folder.glob("*/*")) if path.is_file() and not _hidden(path, folder)]
    ignored = [path for path in files if path.suffix.lower() not in SUFFIXES]
    kinds = listing(sorted({path.suffix or "no suffix" for path in ignored}))
    hidden = _images(folder, "*/*", hidden=True)
    move = "move them into the folder of their class"
    outside: tuple[tuple[list[Path], Severity, str, str, str], ...] = (
        (deep, "warning", "too deep", "in folders inside class folders", move),
        (loose, "warning", "no class", "in no class folder", move),
        (ignored, "hint", "no images", f"no images ({kinds})", f"save images as one of {' '.join(SUFFIXES)}"),
        (hidden, "hint", "hidden", "hidden (their name or folder begins with a dot)", "rename them if they are wanted"),
    )
    for paths, severity, kind, what, remedy in outside:
        if paths:
            text = f"{len(paths)} file(s) are {what} and were ignored:{lines(paths)}"
            yield Finding(severity, kind, text, remedy, names(paths))


def view(entries: Iterable[Entry], look: Callable[[Entry, Photo], None]) -> tuple[Finding, ...]:
    """Decode the images, one at a time, and show each to `look`. A finding names those that cannot be read."""
    broken = {}
    for entry in entries:
        try:
            photo = read(entry.path)
        except ImageError as error:
            broken[entry.path] = error.what
        else:
            look(entry, photo)
    return tuple(unreadable(broken))


def load(
    catalogue: Catalogue,
    classes: Sequence[str],
    size: int,
    look: Callable[[Entry, Photo], None] = lambda *_: None,
) -> LabelledImages:
    """Decode the images to size x size, and show each to `look` as it is; labels are positions in `classes`.

    Raises:
        UsageError: folders that are no class of the federation, or images that cannot be read; all are named.
    """
    for name in catalogue.classes:
        if name not in classes:
            raise UsageError(
                f"{name!r} is not a class of this federation, whose classes are {', '.join(classes)}",
                f"rename or remove the folder {name}; {nearest(name, classes)}",
            )
    images = []

    def see(entry: Entry, photo: Photo) -> None:
        images.append(photo.fit(size))
        look(entry, photo)

    refuse(view(catalogue.entries, see))
    return LabelledImages(
        np.stack(images),
        np.array([classes.index(entry.class_name) for entry in catalogue.entries], np.int64),
        tuple(entry.digest for entry in catalogue.entries),
        tuple(entry.path for entry in catalogue.entries),
    )


def split_holdout(images: LabelledImages, share: float, seed: int) -> tuple[LabelledImages, LabelledImages] | None:
    """Training and held-out images, a `share` of each class and at least one; None when there are too few for that."""
    if not enough(Counter(images.labels.tolist())):
        return None
    held_out = [order[: max(1, round(share * len(order)))] for order in _by_class(images, seed)]
    test = np.sort(np.concatenate(held_out))
    return images.take(np.setdiff1d(np.arange(len(images.labels)), test)), images.take(test)


def enough(counts: Counter[Any]) -> bool:
    """Whether there are enough images, by class, to hold some out."""
    return counts.total() >= LEAST and min(counts.values()) >= LEAST_PER_CLASS


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
