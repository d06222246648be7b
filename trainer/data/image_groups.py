"""Groups of images that belong on one side, training or held out: equal pixels, look-alikes,
and what the user says.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from broker_config.protocol.errors import UsageError
from edge.inference.image_decoding import ImageError
from trainer.data.checks.image_facts import ImageFacts, measure_image
from trainer.data.checks.likeness import Pair, find_alike
from trainer.data.folder_scan import Entry, decode_entries

_COLUMNS = ("file", "group")
_HELP = (
    "pass a regular expression on file names, whose parentheses (else the whole match) name the "
    "group, as in --group '^(.*)_[0-9]+[.]'; or a CSV file with the columns file,group"
)


class Groups(NamedTuple):
    """Which images belong together, by their positions."""

    numbers: np.ndarray  # int64 [n]: equal for images of one group, in order of first occurrence
    pairs: list[Pair]  # that look alike, the likest first

    @property
    def members(self) -> list[list[int]]:
        """The positions in each group of several images."""
        found: dict[int, list[int]] = defaultdict(list)
        for position, number in enumerate(self.numbers.tolist()):
            found[number].append(position)
        return [positions for positions in found.values() if len(positions) > 1]


def unite(count: int, links: Iterable[tuple[int, int]]) -> np.ndarray:
    """Number int64 [count] the sets that links between positions make,
    in order of first occurrence.
    """
    parents = list(range(count))

    def find(position: int) -> int:
        while parents[position] != position:
            parents[position] = position = parents[parents[position]]
        return position

    for one, other in links:
        first, second = sorted((find(one), find(other)))
        parents[second] = first
    numbers: dict[int, int] = {}
    return np.array(
        [numbers.setdefault(find(position), len(numbers)) for position in range(count)], np.int64
    )


def group_images(facts: Sequence[ImageFacts], keys: Mapping[Path, str]) -> Groups:
    """Groups of images, by their facts and by what the user says (`read_keys`)."""
    pairs = find_alike([each.thumbnail for each in facts])
    links = [(pair.one, pair.other) for pair in pairs]
    first: dict[bytes | str, int] = {}
    for position, each in enumerate(facts):
        links.append((first.setdefault(each.pixels, position), position))
        if (key := keys.get(each.path)) is not None:
            links.append((first.setdefault(key, position), position))
    return Groups(unite(len(facts), links), pairs)


def group_entries(entries: Sequence[Entry], keys: Mapping[Path, str]) -> dict[str, int]:
    """The group of each image by its digest; images that cannot be read have none."""
    facts = []
    digests = []
    for entry, photo in decode_entries(entries):
        if not isinstance(photo, ImageError):
            facts.append(measure_image(entry, photo))
            digests.append(entry.digest)
    return dict(zip(digests, group_images(facts, keys).numbers.tolist(), strict=True))


def read_keys(given: str, entries: Sequence[Entry]) -> dict[Path, str]:
    """Of images the names of their groups, from --group.

    Args:
        given: a CSV file (`file`: CLASS/FILE, `group`), or a regular expression on file names.
        entries: the images, of all folders.

    Raises:
        UsageError: what is wrong with either.
    """
    keys = (
        _read_table(Path(given), entries)
        if given.lower().endswith(".csv")
        else _match_names(given, entries)
    )
    if len(entries) > 1 and len(keys) == len(entries) and len(set(keys.values())) == 1:
        raise UsageError(
            f"--group {given!r} puts all {len(entries)} images into one group, "
            f"{next(iter(keys.values()))!r}",
            f"nothing would be left to hold out; {_HELP}",
        )
    return keys


def _match_names(pattern: str, entries: Sequence[Entry]) -> dict[Path, str]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--group {pattern!r} is no regular expression: {error}", _HELP) from error
    keys = {}
    for entry in entries:
        if match := expression.search(entry.path.name):
            parts = match.groups() or (match[0],)
            keys[entry.path] = "|".join(part or "" for part in parts)
    if not keys:
        raise UsageError(
            f"--group {pattern!r} matches none of {len(entries)} file names, such as "
            f"{entries[0].path.name}",
            _HELP,
        )
    return keys


def _read_table(file: Path, entries: Sequence[Entry]) -> dict[Path, str]:
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            rows = csv.DictReader(text)
            if lacking := [name for name in _COLUMNS if name not in (rows.fieldnames or ())]:
                raise UsageError(
                    f"{file} lacks the column {lacking[0]}",
                    f"write {','.join(_COLUMNS)} as its first line",
                )
            said = [
                (
                    rows.line_num,
                    str(row["file"] or "").strip().replace("\\", "/"),
                    str(row["group"] or "").strip(),
                )
                for row in rows
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{file} cannot be read: {reason}",
            "pass a CSV file in UTF-8 with the columns file,group",
        ) from (error)
    paths: dict[str, list[Path]] = defaultdict(list)
    for entry in entries:
        paths["/".join(entry.path.parts[-2:])].append(entry.path)
    folders = {entry.path.parent.parent for entry in entries}
    keys: dict[Path, str] = {}
    for line, name, group in said:
        if not group or not (name in paths or any((folder / name).is_file() for folder in folders)):
            what = (
                f"there is no image {name!r} in {', '.join(map(str, sorted(folders)))}"
                if group
                else "it has no group"
            )
            raise UsageError(
                f"{file}, line {line}: {what}",
                "write each image as CLASS/FILE, with the name of its group beside it",
            )
        for path in paths[name]:
            if keys.setdefault(path, group) != group:
                raise UsageError(
                    f"{file} puts {name} into two groups, {keys[path]!r} and {group!r}",
                    "keep one row of it",
                )
    return keys
