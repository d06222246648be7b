"""Groups of images that belong on one side, training or held out: equal pixels, look-alikes,
and what the user says.
"""

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from broker_config.protocol.errors import UsageError
from edge.inference.image_decoding import ImageError
from trainer.data.checks.image_facts import ImageFacts, measure_image
from trainer.data.checks.likeness import Pair, find_alike
from trainer.data.folder_scan import Entry, decode_entries

UNGROUPED = (
    "no groups of images are known: where several images show one part, the accuracy is too good; "
    "edge-node check proposes groups, and --group takes them"
)
# Names that begin with what a part or a moment is called, and end with a view or a tile of it.
_PATTERNS = (
    r"^(.*[0-9].*?)[^0-9A-Za-z]+[0-9A-Za-z]+[.]",  # part-12_03.png, part12_left.png
    r"^(.*[0-9])[A-Za-z]{1,2}[.]",  # 0012a.png
)
_GAPS = (2, 5, 10, 30, 60)  # seconds between images of two parts, at least
_COPIED = 60  # seconds within which all files were written where their times mean nothing
_NUMBER = re.compile(r"(.*?)([0-9]{1,9})$")  # of a file's stem: the last one
_NEAR = 10  # numbers between two images of one part, at most
_MANY = 5  # pairs of look-alikes, from which their numbers mean something
_SHARE = 4  # images are no group if they are more than the n-th part of all
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


class Proposal(NamedTuple):
    """Groups that a plant's files suggest, for a person to judge."""

    why: str  # what suggests them
    pattern: str  # for --group; empty where only a table can say it
    keys: Mapping[Path, str]  # the group of an image

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return len(set(self.keys.values()))

    def write(self, file: Path) -> None:
        """Write the table that --group takes.

        Raises:
            UsageError: it cannot be written.
        """
        try:
            with file.open("w", newline="", encoding="utf-8") as text:
                rows = csv.writer(text)
                rows.writerow(_COLUMNS)
                for path, key in self.keys.items():
                    rows.writerow(["/".join(path.parts[-2:]), key])
        except (OSError, UnicodeEncodeError) as error:
            raise UsageError(
                f"{file} cannot be written: {error}", "run the command in a folder of yours"
            ) from error


def propose_groups(
    entries: Sequence[Entry], alike: Sequence[tuple[Path, Path]] = ()
) -> Proposal | None:
    """Propose groups by the names of files, else by the times at which they were written, else by
    numbers that follow one another where most look-alikes have such numbers.

    None where nothing is plausible.

    Args:
        entries: the images.
        alike: pairs that look alike. They are grouped without being asked for; what lies between
            them is not.
    """
    for pattern in _PATTERNS:
        keys = _find_matches(re.compile(pattern), entries)
        if _is_plausible(keys, entries):
            return Proposal("names", pattern, keys)
    return _propose_by_times(entries) or _propose_by_numbers(entries, alike)


def _propose_by_times(entries: Sequence[Entry]) -> Proposal | None:
    times = sorted((entry.path.stat().st_mtime, entry.path) for entry in entries)
    if not times or times[-1][0] - times[0][0] < _COPIED:
        return None
    for gap in _GAPS:
        keys: dict[Path, str] = {}
        number = 0
        before = times[0][0]
        for time, path in times:
            number += time - before >= gap
            keys[path] = str(number)
            before = time
        if _is_plausible(keys, entries):
            return Proposal("times", "", keys)
    return None


def _propose_by_numbers(
    entries: Sequence[Entry], alike: Sequence[tuple[Path, Path]]
) -> Proposal | None:
    """Join numbers between two look-alikes of one class that are few numbers apart."""
    places: dict[tuple[str, int], int] = {}
    numbers: dict[Path, tuple[str, int]] = {}
    for position, entry in enumerate(entries):
        if found := _NUMBER.match(entry.path.stem):
            numbers[entry.path] = f"{entry.class_name}/{found[1]}", int(found[2])
            places[numbers[entry.path]] = position
    links = []
    near = 0
    for one, other in alike:
        if one not in numbers or other not in numbers:
            continue
        name, first = numbers[one]
        same, last = numbers[other]
        if name == same and abs(last - first) <= _NEAR:
            near += 1
            low = min(first, last)
            between = [places.get((name, low + step)) for step in range(abs(last - first) + 1)]
            there = [place for place in between if place is not None]
            links += [(there[0], place) for place in there[1:]]
    if near < _MANY or 2 * near < len(alike):
        return None
    joined = unite(len(entries), links).tolist()
    several = Counter(joined)
    keys = {
        entry.path: str(number)
        for entry, number in zip(entries, joined, strict=True)
        if several[number] > 1
    }
    return Proposal("numbers", "", keys)


def _is_plausible(keys: Mapping[Path, str], entries: Sequence[Entry]) -> bool:
    """Return whether groups are neither classes nor single images."""
    sizes = Counter(keys.values())
    classes = {entry.class_name for entry in entries}
    if not sizes or len(sizes) < 2 * len(classes):
        return False
    several = sum(size for size in sizes.values() if size > 1)
    return 2 * several >= len(entries) and _SHARE * max(sizes.values()) <= len(entries)


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
    keys = _find_matches(expression, entries)
    if not keys:
        raise UsageError(
            f"--group {pattern!r} matches none of {len(entries)} file names, such as "
            f"{entries[0].path.name}",
            _HELP,
        )
    return keys


def _find_matches(expression: re.Pattern[str], entries: Sequence[Entry]) -> dict[Path, str]:
    keys = {}
    for entry in entries:
        if match := expression.search(entry.path.name):
            parts = match.groups() or (match[0],)
            keys[entry.path] = "|".join(part or "" for part in parts)
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
