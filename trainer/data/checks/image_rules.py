"""Rules on a plant's images.

Each is one function, from facts (`folder_scan`, `image_facts`) to findings. Those on decoded
images are registered, and other packages add theirs.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from broker_config.protocol.names import is_class_name, show_name
from broker_config.registry import Registry
from edge.inference.image_decoding import SUFFIXES, unused_factor
from trainer.data.checks.findings import (
    CheckedImages,
    Finding,
    ImageCheck,
    Severity,
    format_items,
    format_lines,
    format_paths,
)
from trainer.data.checks.image_facts import ImageFacts
from trainer.data.folder_scan import Entry, FolderScan, is_held_out
from trainer.data.image_groups import Groups

MIN_TO_TRAIN = 2  # images
# images, or groups of look-alikes, below which none are held out
MIN_CLASS_IMAGES = 5
MIN_IMAGES = 20

_CHANCE = 0.01  # how improbable it must be that a format occurs in one class only
# factors from which images count as too small and as too large
_UPSCALED = 1.5
_SHRUNK = 8
_SQUASHED = 1.25  # ratio of width and height, or between two images' ratios
# gray values: means of nearly black and white images, deviation of empty ones
_BLACK = 8
_WHITE = 247
_FLAT = 1.0
# robust standard deviations and gray values that make a brightness an outlier
_OUTLIER = 5
_MIN_DEVIATION = 50
_MIN_TO_COMPARE = 8  # images of a class, below which it has no usual brightness
_IMBALANCE = 5  # ratio of the largest class to the smallest

IMAGE_CHECKS: Registry[ImageCheck] = Registry("image_checks")
# What makes the accuracy too good, or training impossible, comes first among the findings of one
# severity; rules of other packages come last.
_ORDER = (
    "look_alikes_across",
    "count",
    "classes",
    "duplicates",
    "sizes",
    "depth",
    "brightness",
    "leaks",
    "look_alikes",
)

Facts = Sequence[ImageFacts]
Findings = Iterator[Finding]


def has_enough_to_hold_out(counts: Counter[Any]) -> bool:
    """Whether there are enough images, or groups of look-alikes, by class, to hold some out."""
    return counts.total() >= MIN_IMAGES and min(counts.values()) >= MIN_CLASS_IMAGES


def check_folder(found: FolderScan) -> Findings:
    """Rules on a folder's layout and files, before an image is decoded."""
    yield from check_copies(found)
    yield from check_layout(found)


def check_copies(found: FolderScan) -> Findings:
    """Identical files, in one class or in two."""
    groups = [group for group in found.groups if len(group) > 1]
    across = []
    for group in groups:
        if len({entry.class_name for entry in group}) > 1:
            across.append(group)
    within = []
    for group in groups:
        if group not in across:
            within.append([entry.path for entry in group])
    if across:
        collected_paths = []
        for entries in across:
            collected_paths.append([entry.path for entry in entries])
        yield _two_classes(collected_paths)
    if within:
        yield Finding(
            "warning",
            "twice",
            f"{len(within)} image(s) are there more than once, and count "
            f"once:{_format_groups(within)}",
            "remove the copies",
            format_paths(itertools.chain.from_iterable(within)),
        )


def check_layout(found: FolderScan) -> Findings:
    """Where images lie, and whether their files can be opened."""
    yield from check_readable(found.unreadable)
    yield from _check_names(found)
    if found.groups or found.unreadable:
        yield from _check_ignored(found)
        yield from _check_empty_folders(found)
    else:
        yield _no_images(found)


def check_beside(found: FolderScan) -> Findings:
    """Held-out images beside a folder of training images, which nobody has mentioned."""
    parent = found.folder.parent if found.folder.name else found.folder.absolute().parent
    for folder in sorted(filter(is_held_out, parent.iterdir())):
        if folder != found.folder and found.names & {path.name for path in folder.glob("*/")}:
            yield Finding(
                "hint",
                "held out",
                f"{folder} looks like held-out images, and was left alone",
                f"check both, and join with both: --test {folder}",
            )


def _check_names(found: FolderScan) -> Findings:
    """Folders that no class can be called like: other encodings, line breaks, slashes."""
    impossible = sorted(name for name in found.names if not is_class_name(name))
    if impossible:
        yield Finding(
            "error",
            "no class's name",
            f"no class can be called like {format_items([*map(show_name, impossible)])}",
            "rename these folders: UTF-8, at most 200 characters, without backslashes, line breaks "
            "and control characters",
            format_paths(found.folder / name for name in impossible),
        )


def check_readable(unreadable: Mapping[Path, str]) -> Findings:
    """Images that cannot be read, each with its reason."""
    if unreadable:
        text = (
            f"{len(unreadable)} image(s) cannot be read:{format_lines(list(unreadable.values()))}"
        )
        yield Finding(
            "error", "unreadable", text, "repair or remove these files", format_paths(unreadable)
        )


def check_sources(sources: Sequence[Sequence[Entry]]) -> Findings:
    """Images that are of one class in one source and of another in another."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in itertools.chain(*sources):
        groups[entry.digest].append(entry)
    kept = []
    for group in groups.values():
        if len({entry.class_name for entry in group}) > 1:
            kept.append(group)
    if differing := kept:
        paths = []
        for entries in differing:
            paths.append([entry.path for entry in entries])
        yield _two_classes(paths)


def _no_images(found: FolderScan) -> Finding:
    remedy = f"pass a folder with one folder of images ({' '.join(SUFFIXES)}) for each class"
    if found.nested:
        inside = sorted(
            {path.parent.parent for path in found.nested},
            key=lambda path: (is_held_out(path), path),
        )
        test = (
            f" with --test {inside[-1]}"
            if not is_held_out(inside[0]) and is_held_out(inside[-1])
            else ""
        )
        remedy = f"pass the folder whose folders are the classes, perhaps {inside[0]}{test}"
    elif found.loose:
        remedy = "put each class's images into a folder of its own, named like the class"
        remedy += f"; if {found.folder} is one of these, pass {found.folder.parent}"
    return Finding(
        "error", "no images", f"there are no class folders with images in {found.folder}", remedy
    )


def _check_ignored(found: FolderScan) -> Findings:
    """Files that are no images of a class."""
    kinds = format_items(sorted({path.suffix or "no suffix" for path in found.others}))
    move = "move them into the folder of their class"
    rows: tuple[tuple[list[Path], Severity, str, str, str], ...] = (
        (found.nested, "warning", "too deep", "in folders inside class folders", move),
        (found.loose, "warning", "no class", "in no class folder", move),
        (
            found.others,
            "hint",
            "no images",
            f"no images ({kinds})",
            f"save images as one of {' '.join(SUFFIXES)}",
        ),
        (
            found.hidden,
            "hint",
            "hidden",
            "hidden (their name or folder begins with a dot)",
            "rename them if they are wanted",
        ),
    )
    for paths, severity, kind, what, remedy in rows:
        if paths:
            text = f"{len(paths)} file(s) are {what} and were ignored:{format_lines(paths)}"
            yield Finding(severity, kind, text, remedy, format_paths(paths))


def _check_empty_folders(found: FolderScan) -> Findings:
    """Folders of classes without an image."""
    if found.empty:
        yield Finding(
            "warning",
            "no images",
            f"{len(found.empty)} folder(s) have no image: "
            f"{format_items([path.name for path in found.empty])}",
            "put images of the class into it, or remove it",
            format_paths(found.empty),
        )


def _two_classes(groups: Sequence[Sequence[Path]]) -> Finding:
    return Finding(
        "error",
        "two classes",
        f"{len(groups)} image(s) are the same in two classes:{_format_groups(groups)}",
        "remove each from the class where it is wrong",
        format_paths(itertools.chain.from_iterable(groups)),
    )


def _format_groups(groups: Sequence[Sequence[Path]]) -> str:
    """Groups of identical images, as text."""
    return format_lines([" = ".join(map(str, paths)) for paths in groups])


def check_images(facts: Facts, size: int, groups: Groups, least: int = MIN_TO_TRAIN) -> Findings:
    """Rules on decoded images and their groups,
    for a network whose input is `size` pixels wide and high.

    A plant needs `least` images for training.
    """
    if all(each.held_out for each in facts):
        return  # that there is nothing to train with has been found already
    images = CheckedImages(facts, groups, size, least)
    ours = [name for name in _ORDER if name in IMAGE_CHECKS]
    others = [name for name in IMAGE_CHECKS if name not in _ORDER]
    for name in (*ours, *others):
        yield from IMAGE_CHECKS[name](images)


def _count_by_class(facts: Facts) -> Counter[str]:
    return Counter(sorted(each.class_name for each in facts))


def check_count(images: CheckedImages) -> Findings:
    """Too few images to train, or to hold some out."""
    facts = images.facts
    groups = images.groups
    train = [each for each in facts if not each.held_out]
    counts = _count_by_class(train)
    pairs = {
        (number, each.class_name)
        for number, each in zip(groups.numbers.tolist(), facts, strict=True)
    }
    group_counts = Counter(sorted(name for _, name in pairs))
    if len(train) < images.least:
        yield Finding(
            "error",
            "too few",
            f"there is {len(train)} image; a node needs two or more to train",
            "label a few more",
        )
    elif len(facts) == len(train) and not has_enough_to_hold_out(counts):
        rarest = min(counts, key=lambda name: counts[name])
        yield Finding(
            "warning",
            "too few",
            f"{len(train)} images, {counts[rarest]} of them of {rarest}, are few; each will be "
            "left out in turn to judge the model, and the interval of its accuracy is wide",
            f"label more, to {MIN_IMAGES} and {MIN_CLASS_IMAGES} of each class, or bring --test "
            "FOLDER",
        )
    elif len(facts) == len(train) and not has_enough_to_hold_out(group_counts):
        rarest = min(group_counts, key=lambda name: group_counts[name])
        yield Finding(
            "warning",
            "too few",
            f"{len(train)} images show only {len({number for number, _ in pairs})} different "
            f"spots, {group_counts[rarest]} of them of {rarest}; each will be left out in turn to "
            "judge the model, and the interval of its accuracy is wide",
            f"label images of more spots, to {MIN_IMAGES} and {MIN_CLASS_IMAGES} of each class, "
            "or bring --test FOLDER",
        )


def check_classes(images: CheckedImages) -> Findings:
    """One class only, classes that only one side has,
    or far more images of one class than of another.
    """
    facts = images.facts
    by_class = []
    for side in (False, True):
        by_class.append(_count_by_class([each for each in facts if each.held_out == side]))
    counts, held_out = by_class
    if len(counts) == 1:
        (name,) = counts
        yield Finding(
            "warning",
            "one class",
            f"all images are of {name}; there is nothing to tell apart",
            "add another class",
        )
    if held_out and not set(held_out) & set(counts):
        yield Finding(
            "error",
            "classes",
            "no held-out image is of a class that is trained: there are "
            f"{format_items(sorted(held_out))}",
            "hold out images of the training folder's classes, or leave out --test",
        )
    elif unknown := sorted(set(held_out) - set(counts)):
        yield Finding(
            "warning",
            "classes",
            f"there are held-out images of {format_items(unknown)}, but none to train with; "
            "they count in the accuracy among all classes only",
            "add such images to the training folder, or remove them from the held-out ones",
        )
    if held_out and (untested := sorted(set(counts) - set(held_out))):
        yield Finding(
            "hint",
            "classes",
            f"there are no held-out images of {format_items(untested)}; nothing will tell how "
            "well they are recognised",
            "hold some out",
        )
    (most, many) = counts.most_common(1)[0]
    (least, few) = counts.most_common()[-1]
    if many >= _IMBALANCE * few:
        yield Finding(
            "hint",
            "imbalance",
            f"{most} has {many} images, {least} only {few}; a rare class is learnt last, and "
            "accuracy hardly shows it",
            f"label more of {least}",
        )


def check_duplicates(images: CheckedImages) -> Findings:
    """The same pixels twice: held out and among the training images, in two classes, or in one."""
    facts = images.facts
    alike: dict[bytes, list[ImageFacts]] = defaultdict(list)
    for each in facts:
        alike[each.pixels].append(each)
    groups = [group for group in alike.values() if len(group) > 1]
    leaked = []
    for group in groups:
        if len({each.held_out for each in group}) == 2:
            leaked.append(group)
    across = []
    for group in groups:
        if group not in leaked and len({each.class_name for each in group}) > 1:
            across.append(group)
    within = [group for group in groups if group not in leaked and group not in across]
    if leaked:
        yield Finding(
            "error",
            "held out",
            f"{len(leaked)} image(s) are among both the training and the held-out images:"
            f"{_format_groups(_paths(leaked))}",
            "remove each from one of the two folders",
            format_paths(itertools.chain(*_paths(leaked))),
        )
    if across:
        yield _two_classes(_paths(across))
    if within:
        yield Finding(
            "warning",
            "twice",
            (
                f"{len(within)} image(s) are stored more than once, as different files, and "
                "count as often:"
            )
            + _format_groups(_paths(within)),
            "remove the copies",
            format_paths(itertools.chain(*_paths(within))),
        )


def _paths(groups: Sequence[Facts]) -> list[list[Path]]:
    paths: list[list[Path]] = []
    for group in groups:
        paths.append([each.path for each in group])
    return paths


def check_look_alikes_across(images: CheckedImages) -> Findings:
    """Groups with images on both sides: what is held out has been seen in training."""
    facts = images.facts
    groups = images.groups
    shown: list[tuple[float, int, int]] = []
    concerned: dict[Path, None] = {}
    judged: set[Path] = set()
    for positions in groups.members:
        sides = []
        for side in (False, True):
            sides.append([p for p in positions if facts[p].held_out == side])
        train, test = sides
        if (
            train
            and test
            and not {facts[p].pixels for p in train} >= {facts[p].pixels for p in test}
        ):
            mine = set(positions)
            across = [
                (pair.likeness, pair.one, pair.other)
                for pair in groups.pairs
                if pair.one in mine and facts[pair.one].held_out != facts[pair.other].held_out
            ]
            # the user says so, or others stand between
            shown += across or [(0.0, train[0], test[0])]
            concerned |= dict.fromkeys(facts[p].path for p in positions)
            judged |= {facts[p].path for p in test}
    if shown:
        shown.sort(key=lambda each: (-each[0], *each[1:]))
        lines = [f"{facts[one].path} ~ {facts[other].path}" for _, one, other in shown]
        yield Finding(
            "warning",
            "held out",
            f"{len(judged)} of {sum(each.held_out for each in facts)} held-out images look like "
            "training images, or are of one --group with them; the accuracy will be too "
            f"good:{format_lines(lines)}",
            "keep all images of a spot in one of the two folders, or leave out --test",
            format_paths(concerned),
        )


def check_look_alikes(images: CheckedImages) -> Findings:
    """Groups on one side: of look-alikes, or as the user says."""
    facts = images.facts
    groups = images.groups
    found = []
    for members in groups.members:
        if len({facts[p].held_out for p in members}) == 1:
            found.append(members)
    kept = []
    for alike in found:
        if len({facts[p].pixels for p in alike}) > 1:
            kept.append(alike)
    found = kept
    if found:
        found.sort(key=len, reverse=True)
        count = sum(map(len, found))
        yield Finding(
            "hint",
            "alike",
            f"{count} of {len(facts)} images are in {len(found)} group(s), of look-alikes or as "
            "--group says; each group trains or is held out as a "
            f"whole:{format_lines([_format_group(facts, members) for members in found])}",
            "look at them: where those of a group show one spot all is well; what else belongs "
            "together, --group says",
            format_paths(facts[position].path for position in itertools.chain.from_iterable(found)),
        )


_SHOWN_OF_GROUP = 4  # images


def _format_group(facts: Facts, members: Sequence[int]) -> str:
    names = [str(facts[position].path) for position in members]
    more = f" ~ and {len(names) - _SHOWN_OF_GROUP} more" if len(names) > _SHOWN_OF_GROUP else ""
    return " ~ ".join(names[:_SHOWN_OF_GROUP]) + more


def check_sizes(images: CheckedImages) -> Findings:
    """Images that lose something when they are brought to the network's size."""
    facts = images.facts
    size = images.size
    sizes = Counter(each.size for each in facts)
    sizes_text = format_items([f"{name} ({count})" for name, count in sizes.most_common()])
    small = [each for each in facts if size >= _UPSCALED * min(each.width, each.height)]
    large = [each for each in facts if min(each.width, each.height) >= _SHRUNK * size]
    ratios = [each.width / each.height for each in facts]
    if small:
        yield Finding(
            "warning",
            "too small",
            f"{len(small)} image(s) are far smaller than the network's input of {size} x {size}, "
            f"and are enlarged:{format_lines([f'{each.path} ({each.size})' for each in small])}",
            "bring images of a higher resolution, or let the coordinator choose a smaller --size",
            format_paths(each.path for each in small),
        )
    if large:
        factor = max(min(each.width, each.height) for each in large) // size
        yield Finding(
            "hint",
            "too large",
            f"{len(large)} image(s) are shrunk up to {factor} times to {size} x {size}; a defect "
            f"less than {factor} pixels wide vanishes",
            "crop the images around what matters, in the same way on the line",
            format_paths(each.path for each in large),
        )
    if max(ratios) >= _SQUASHED * min(ratios):
        yield Finding(
            "warning",
            "squashed",
            f"images have different proportions, and each is squashed into a square: {sizes_text}",
            "crop all images to the same proportions",
        )
    elif len(sizes) > 1:
        yield Finding(
            "hint",
            "sizes",
            f"images have different sizes: {sizes_text}",
            "see whether they come from one camera with one setting",
            format_paths(each.path for each in facts if each.size != sizes.most_common(1)[0][0]),
        )
    elif max(ratios[0], 1 / ratios[0]) >= _SQUASHED:
        yield Finding(
            "hint",
            "squashed",
            f"images of {sizes_text} are squashed into a square",
            "nothing, if the line's images have the same proportions",
        )


def check_depth(images: CheckedImages) -> Findings:
    """Images of 16 bits that leave the upper ones unused, as cameras of 12 or 14 bits save them."""
    facts = images.facts
    deep = [each for each in facts if each.bits]
    bits = max((each.bits for each in deep), default=0)
    factor = unused_factor(bits)
    if factor > 1:
        yield Finding(
            "warning",
            "bits",
            f"{len(deep)} image(s) of 16 bits use {bits} of them, and are read {factor} times too "
            "dark",
            f"multiply their values by {factor}, here and on the line: let the camera save them "
            f"so, or run mogrify -evaluate multiply {factor} FILE",
            format_paths(each.path for each in deep),
        )


def check_brightness(images: CheckedImages) -> Findings:
    """Images that show nothing, or that are far darker or brighter than the others."""
    facts = images.facts
    empty = [
        each for each in facts if each.contrast < _FLAT or not _BLACK <= each.brightness <= _WHITE
    ]
    if empty:
        yield Finding(
            "warning",
            "empty",
            f"{len(empty)} image(s) are black, white or of one gray, and show nothing:"
            + format_lines([f"{each.path} (mean {each.brightness:.0f})" for each in empty]),
            "remove them, and see to the light or the camera",
            format_paths(each.path for each in empty),
        )
    shown = [each for each in facts if each not in empty]
    usual = {}
    for name in _count_by_class(shown):
        usual[name] = _usual([each for each in shown if each.class_name == name])
    over_all = _usual(shown) if shown else (0.0, np.inf)
    odd = []
    for each in shown:
        if any(abs(each.brightness - m) > limit for m, limit in (usual[each.class_name], over_all)):
            odd.append(each)
    if odd:
        yield Finding(
            "hint",
            "brightness",
            f"{len(odd)} image(s) are far darker or brighter than others:"
            + format_lines(
                [
                    (
                        f"{each.path} (mean {each.brightness:.0f}, usual "
                        f"{usual[each.class_name][0]:.0f})"
                    )
                    for each in odd
                ]
            ),
            "see whether they were taken in the same light, with the same exposure",
            format_paths(each.path for each in odd),
        )


def _usual(facts: Facts) -> tuple[float, float]:
    """The median brightness, and the deviation from it that makes an outlier."""
    values = np.array([each.brightness for each in facts])
    if len(values) < _MIN_TO_COMPARE:
        return float(np.median(values)), np.inf
    median = float(np.median(values))
    # of a normal distribution, the standard deviation
    deviation = 1.4826 * float(np.median(np.abs(values - median)))
    return median, max(_OUTLIER * deviation, _MIN_DEVIATION)


def check_leaks(images: CheckedImages) -> Findings:
    """Formats that occur in one class only: a network may learn them instead of the defect."""
    facts = images.facts
    counts = _count_by_class(facts)
    for what, values in (
        ("file type", [each.format for each in facts]),
        ("size", [each.size for each in facts]),
        ("colour mode", [each.mode for each in facts]),
        ("camera", [each.camera or "no camera's name" for each in facts]),
    ):
        owners: dict[str, list[ImageFacts]] = defaultdict(list)
        for value, each in zip(values, facts, strict=True):
            owners[value].append(each)
        telling = {}
        for owner, group in owners.items():
            if (
                len({each.class_name for each in group}) == 1
                and (counts[group[0].class_name] / len(facts)) ** len(group) < _CHANCE
            ):
                telling[owner] = group
        if telling:
            texts = [
                f"all {len(group)} images with {value} are of {group[0].class_name}"
                for value, group in telling.items()
            ]
            yield Finding(
                "warning",
                "giveaway",
                f"the {what} gives a class away: {format_items(texts, '; ')}",
                "take and save the images of all classes in the same way; else a network may "
                "learn the traces of that, and fail on the line",
                format_paths(each.path for each in itertools.chain.from_iterable(telling.values())),
            )
