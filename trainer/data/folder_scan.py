"""Image files below a folder with one folder for each class: what is there, without judging it.

Images are ordered by the SHA-256 of their bytes, so that names, file types and folder order never
reach training.
"""

import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from broker_config.protocol.errors import UsageError
from broker_config.storage import disk
from edge.inference.image_decoding import SUFFIXES, ImageError, Photo, drop_annotated, read_image
from trainer.progress.long_work import steps

# names of folders
_HELD_OUT = {"test", "held-out", "held_out", "holdout", "val", "valid", "validation"}


class Entry(NamedTuple):
    """An image file, by its SHA-256."""

    path: Path
    class_name: str
    digest: str


class FolderScan(NamedTuple):
    """The files of a class-folder tree."""

    folder: Path
    # images, ordered by digest; those of a group are identical
    groups: tuple[tuple[Entry, ...], ...]
    unreadable: dict[Path, str]  # with the reason
    loose: list[Path]  # images in no class folder
    nested: list[Path]  # images in folders inside class folders
    hidden: list[Path]  # images whose name or folder begins with a dot: a system's or a tool's own
    others: list[Path]  # files in class folders that are no images
    empty: list[Path]  # class folders without a file that is an image

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The images, each once."""
        return tuple(group[0] for group in self.groups)

    @property
    def names(self) -> set[str]:
        """The names of the folders with images in them."""
        return {entry.path.parent.name for entry in itertools.chain.from_iterable(self.groups)}

    def with_aliases(self, aliases: Mapping[str, str]) -> "FolderScan":
        """The same files, those in a folder that is called by an alias of a class as that
        class's.
        """
        groups = []
        for group in self.groups:
            groups.append(
                tuple(
                    entry._replace(class_name=aliases.get(entry.class_name, entry.class_name))
                    for entry in group
                )
            )
        return self._replace(groups=tuple(groups))


def scan_folder(folder: Path) -> FolderScan:
    """Find and hash images, FOLDER/CLASS/FILE, without annotated pictures.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        folder_text = f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist"
        raise UsageError(folder_text, "pass a folder with one folder of images for each class")
    groups: dict[str, list[Entry]] = defaultdict(list)
    unreadable: dict[Path, str] = {}
    found = [_find_images(folder, pattern) for pattern in ("*/*", "*.*", "*/*/**/*")]
    kept = {*drop_annotated(itertools.chain(*found))}
    kept_paths = []
    for paths in found:
        kept_paths.append([path for path in paths if path in kept])
    images, loose, nested = kept_paths
    for path in steps("reading images", images):
        try:
            with disk.open_regular(path) as file:
                is_empty = not os.fstat(file.fileno()).st_size
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            unreadable[path] = f"{path} cannot be read: {error.strerror}"
            continue
        if is_empty:
            unreadable[path] = f"{path} is empty"
        else:
            groups[digest].append(Entry(path, path.parent.name, digest))
    files = [
        path
        for path in sorted(folder.glob("*/*"))
        if path.is_file() and not _is_hidden(path, folder)
    ]
    taken = {path.relative_to(folder).parts[0] for path in (*images, *nested)}
    folders = [path for path in sorted(folder.glob("*/")) if not _is_hidden(path, folder)]
    return FolderScan(
        folder,
        tuple(tuple(groups[digest]) for digest in sorted(groups)),
        unreadable,
        loose=loose,
        nested=nested,
        hidden=_find_images(folder, "*/*", hidden=True),
        others=[path for path in files if path.suffix.lower() not in SUFFIXES],
        empty=[path for path in folders if path.name not in taken],
    )


def is_held_out(folder: Path) -> bool:
    """Whether a folder is called like one of held-out images."""
    return folder.name.lower() in _HELD_OUT


def decode_entries(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Photo | ImageError]]:
    """Decode images one at a time; an error stands for one that cannot be decoded."""
    for entry in entries:
        try:
            yield entry, read_image(entry.path)
        except ImageError as error:
            yield entry, error


def _find_images(folder: Path, pattern: str, *, hidden: bool = False) -> list[Path]:
    """The image files below the folder that fit a pattern."""
    return sorted(
        path
        for path in folder.glob(pattern)
        if path.suffix.lower() in SUFFIXES and _is_hidden(path, folder) == hidden
    )


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
