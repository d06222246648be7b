"""A plant's labelled images, from a folder for each class: catalogues, decoded images,
held-out images, and folds.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from edge.inference.image_decoding import ImageError, Photo
from trainer.data.checks import image_rules
from trainer.data.checks.findings import Finding, raise_errors
from trainer.data.class_names import check_class_folders, check_own_aliases
from trainer.data.folder_scan import Entry, FolderScan, decode_entries, scan_folder
from trainer.seeding import generator


class Catalogue(NamedTuple):
    """The distinct images of a class-folder tree, ordered by digest."""

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
    stem_output: np.ndarray | None = None  # float32 [n, ...], of a frozen stem, where that is known
    # int64 [n]: equal for images that belong on one side; None: each on its own
    groups: np.ndarray | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """class/file, for messages."""
        return tuple(f"{path.parent.name}/{path.name}" for path in self.paths)

    def take(self, index: np.ndarray) -> "LabelledImages":
        """The images at these positions."""
        stem_output = None if self.stem_output is None else self.stem_output[index]
        groups = None if self.groups is None else self.groups[index]
        return LabelledImages(
            self.images[index],
            self.labels[index],
            tuple(self.digests[i] for i in index),
            tuple(self.paths[i] for i in index),
            stem_output,
            groups,
        )

    @staticmethod
    def joined(parts: "Sequence[LabelledImages]") -> "LabelledImages":
        """The images of all parts, in the order of their digests."""
        digests = list(chain.from_iterable(part.digests for part in parts))
        paths = list(chain.from_iterable(part.paths for part in parts))
        groups = None
        if all(part.groups is not None for part in parts):
            groups = np.concatenate([part.groups for part in parts if part.groups is not None])
        whole = LabelledImages(
            np.concatenate([part.images for part in parts]),
            np.concatenate([part.labels for part in parts]),
            tuple(digests),
            tuple(paths),
            groups=groups,
        )
        return whole.take(np.argsort(digests, kind="stable"))

    @property
    def sets(self) -> list[list[int]]:
        """The positions of each group's images, groups in order of their first one."""
        numbers = range(len(self.labels)) if self.groups is None else self.groups.tolist()
        found: dict[int, list[int]] = defaultdict(list)
        for position, number in enumerate(numbers):
            found[number].append(position)
        return list(found.values())

    def among(self, catalogue: Catalogue) -> "LabelledImages":
        """The images that a catalogue contains."""
        wanted = {entry.digest for entry in catalogue.entries}  # both are ordered by digest
        return self.take(np.flatnonzero([digest in wanted for digest in self.digests]))


class Images(NamedTuple):
    """A node's images: for training, and held out if there are enough."""

    train: LabelledImages
    test: LabelledImages | None
    # Whether the held-out ones are of the same folder, and would train if nothing had to be judged.
    were_split: bool = False

    @property
    def whole(self) -> "Images":
        """The same, with the images that were split off among those for training."""
        if self.test is None or not self.were_split:
            return self
        return Images(LabelledImages.joined([self.train, self.test]), None)

    @staticmethod
    def none(size: int) -> "Images":
        """Those of a node that has none, which would be size x size."""
        pixels = np.empty((0, size, size, 3), np.uint8)
        return Images(LabelledImages(pixels, np.empty(0, np.int64), (), ()), None)


def scan(folder: Path) -> Catalogue:
    """Find and hash a plant's images. Byte-identical ones count once.

    Raises:
        UsageError: the folder has an error; the message says which, and what to do.
    """
    return make_catalogue(scan_folder(folder))


def make_catalogue(found: FolderScan) -> Catalogue:
    """The images that were found. Raises as `scan` does."""
    findings = tuple(image_rules.check_folder(found))
    raise_errors(findings)
    return Catalogue(found.entries, findings)


def scan_sources(folders: Sequence[Path], aliases: Mapping[str, str]) -> list[Catalogue]:
    """Scan several sources of images, whose equal classes get the same name.

    Args:
        folders: each with a folder for each class.
        aliases: from a source's name of a class to the common one.

    Raises:
        UsageError: what is wrong with a folder; no source has a class of that name; or sources
            differ about an image.
    """
    scanned = [scan_folder(folder) for folder in folders]
    sources = [Catalogue(make_catalogue(found.with_aliases(aliases)).entries) for found in scanned]
    check_own_aliases(aliases, set(chain.from_iterable(found.names for found in scanned)))
    raise_errors(image_rules.check_sources([source.entries for source in sources]))
    return sources


def drop_duplicates(sources: Sequence[Catalogue]) -> list[Catalogue]:
    """The sources, each without the images of the sources before it."""
    seen: set[str] = set()
    kept = []
    for source in sources:
        kept.append(Catalogue(tuple(entry for entry in source.entries if entry.digest not in seen)))
        seen |= {entry.digest for entry in source.entries}
    return kept


def merge(sources: Sequence[Catalogue]) -> Catalogue:
    """The images of all sources, each once."""
    entries = list(chain.from_iterable(source.entries for source in drop_duplicates(sources)))
    return Catalogue(tuple(sorted(entries, key=lambda entry: entry.digest)))


def load(
    catalogue: Catalogue,
    classes: Sequence[str],
    size: int,
    inspect: Callable[[Entry, Photo], None] = lambda *_: None,
) -> LabelledImages:
    """Decode the images to size x size, passing each to `inspect` in its original size;
    labels index `classes`.

    Raises:
        UsageError: a folder is not a class of the federation, or images cannot be read; the message
            lists them.
    """
    check_class_folders(catalogue.classes, classes)
    images = []
    unreadable = {}
    for entry, photo in decode_entries(catalogue.entries):
        if isinstance(photo, ImageError):
            unreadable[entry.path] = photo.what
        else:
            images.append(photo.resize(size))
            inspect(entry, photo)
    raise_errors(image_rules.check_readable(unreadable))
    return LabelledImages(
        np.stack(images),
        np.array([classes.index(entry.class_name) for entry in catalogue.entries], np.int64),
        tuple(entry.digest for entry in catalogue.entries),
        tuple(entry.path for entry in catalogue.entries),
    )


def load_both(train: Catalogue, test: Catalogue, classes: Sequence[str], size: int) -> Images:
    """Load training and held-out images as `load` does."""
    return Images(load(train, classes, size), load(test, classes, size))


HoldOut = Literal["nothing", "what can be spared", "every class"]
"""Which images are held out where a plant brings no folder of such images.

Where these must give the accuracy, some of `every class`, or nothing if there are too few. Where
they only tell whether training pays, `what can be spared`.
"""


def split_holdout(
    images: LabelledImages, share: float, seed: int, wanted_of: HoldOut = "every class"
) -> Images:
    """Return the images with a `share` of each class held out, by whole groups.

    Of `every class` that is one group at least, or nothing is held out. Of what can be spared, it
    is a share of the groups, rounded down.
    """
    if wanted_of == "nothing":
        return Images(images, None)
    choose = _spare if wanted_of == "what can be spared" else _choose_of_each
    chosen = choose(images, share, seed)
    if not chosen:
        return Images(images, None)
    test = np.flatnonzero(np.isin(_group_of(images), chosen))
    train = np.setdiff1d(np.arange(len(images.labels)), test)
    return Images(images.take(train), images.take(test), were_split=True)


def _spare(images: LabelledImages, share: float, seed: int) -> list[int]:
    """Choose a share of each class's groups, rounded down."""
    labels = images.labels
    group_of = _group_of(images)
    chosen: dict[int, None] = {}
    for order in _shuffle_classes(images, seed):
        drawn = dict.fromkeys(group_of[order].tolist())
        chosen |= dict.fromkeys(list(drawn)[: int(share * len(drawn))])
    kept = np.unique(labels[~np.isin(group_of, list(chosen))])
    return list(chosen) if len(kept) == len(np.unique(labels)) else []


def _choose_of_each(images: LabelledImages, share: float, seed: int) -> list[int]:
    """Choose groups so that a share of each class is held out; none if that cannot be."""
    labels = images.labels
    groups = images.sets
    group_of = _group_of(images)
    # groups to train with
    left = Counter(chain.from_iterable({*labels[positions].tolist()} for positions in groups))
    if not image_rules.has_enough_to_hold_out(left):
        return []
    counts = Counter(labels.tolist())
    held = Counter[int]()
    out = np.zeros(len(groups), bool)

    def hold_out(group: int) -> None:
        out[group] = True
        held.update(labels[groups[group]].tolist())
        left.subtract({*labels[groups[group]].tolist()})

    for order in _shuffle_classes(images, seed):
        (label,) = {*labels[order].tolist()}
        wanted = max(1, round(share * len(order)))
        drawn = [group for group in dict.fromkeys(group_of[order].tolist()) if not out[group]]
        sizes = {group: Counter(labels[groups[group]].tolist()) for group in drawn}
        for group in drawn:
            if held[label] + sizes[group][label] <= wanted and _leaves_some(sizes[group], left):
                hold_out(group)
        possible = [group for group in drawn if _leaves_some(sizes[group], left)]
        if not held[label] and possible:  # even the smallest is more than the share
            hold_out(min(possible, key=lambda group: sizes[group][label]))
    if any(not held[label] for label in counts):
        return []
    return np.flatnonzero(out).tolist()


def _leaves_some(sizes: Counter[int], left: Counter[int]) -> bool:
    """Whether each class of a group keeps another group to train with."""
    return all(left[label] > 1 for label in sizes)


def split_folds(images: LabelledImages, count: int, seed: int) -> list[np.ndarray]:
    """Positions of the images in each of `count` stratified folds, groups whole;
    fewer folds if there are fewer groups.

    Images that are all of one group are on their own: nothing else could be judged by the others.
    """
    if len(images.sets) == 1:
        images = images._replace(groups=None)
    groups = images.sets
    group_of = _group_of(images)
    folds: list[list[int]] = [[] for _ in range(count)]
    of_class = [Counter[int]() for _ in range(count)]
    placed: set[int] = set()
    for position in np.concatenate(list(_shuffle_classes(images, seed))).tolist():
        group = group_of[position]
        label = int(images.labels[position])
        if group not in placed:
            placed.add(group)
            fold = min(
                range(count), key=lambda each: (of_class[each][label], len(folds[each]), each)
            )
            folds[fold] += groups[group]
            of_class[fold].update(images.labels[groups[group]].tolist())
    return [np.sort(fold) for fold in folds if fold]


def _group_of(images: LabelledImages) -> np.ndarray:
    """The position of each image's group among `images.sets`."""
    numbers = np.empty(len(images.labels), np.int64)
    for number, positions in enumerate(images.sets):
        numbers[positions] = number
    return numbers


def _shuffle_classes(images: LabelledImages, seed: int) -> Iterable[np.ndarray]:
    """The positions of each class's images, shuffled."""
    grouped: dict[int, list[int]] = defaultdict(list)
    for position, label in enumerate(images.labels):
        grouped[int(label)].append(position)
    random = generator(seed, "hold out")
    return [random.permutation(grouped[label]) for label in sorted(grouped)]
