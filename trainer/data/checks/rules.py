"""What a plant's engineer should know of its images. Each rule is one function, from looks to findings.

What a folder's layout and files alone tell is found by `data.survey`, what stops an image from being decoded by
`data.view`.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from trainer.data import class_folders
from trainer.data.checks.findings import Finding, lines, listing, names
from trainer.data.checks.image_facts import Look

# Correlation of thumbnails' gradients, from which two images count as nearly the same. In NEU-CLS the one pair
# above 0.88 is one spot taken twice; saved again as JPEG of quality 30, 99 of 100 images stay above 0.87.
_ALIKE = 0.9
_MOST_COMPARED = 10_000  # images; the comparison is quadratic
_CHANCE = 0.01  # how improbable it must be that a format occurs in one class only
_UPSCALED, _SHRUNK = 1.5, 8  # factors from which images count as too small and as too large
_SQUASHED = 1.25  # ratio of width and height, or between two images' ratios
_BLACK, _WHITE, _FLAT = 8, 247, 1.0  # gray values: means of nearly black and white images, deviation of empty ones
_OUTLIER, _LEAST_DEVIATION = 5, 50  # robust standard deviations and gray values that make a brightness an outlier
_LEAST_TO_COMPARE = 8  # images of a class, below which it has no usual brightness
_IMBALANCE = 5  # ratio of the largest class to the smallest

Looks = Sequence[Look]
Found = Iterator[Finding]


def judge(looks: Looks, size: int) -> Found:
    """What the looks tell, for a network whose input is `size` pixels wide and high."""
    if all(each.held_out for each in looks):
        return  # that there is nothing to train with has been found already
    yield from _number(looks)
    yield from _classes(looks)
    yield from _duplicates(looks)
    yield from _sizes(looks, size)
    yield from _brightness(looks)
    yield from _leaks(looks)
    yield from _near_duplicates(looks)


def _counts(looks: Looks) -> Counter[str]:
    return Counter(sorted(each.class_name for each in looks))


def _number(looks: Looks) -> Found:
    """Too few images to train, or to hold some out."""
    train = [each for each in looks if not each.held_out]
    counts = _counts(train)
    if len(train) < 2:
        yield Finding(
            "error", "too few", f"there is {len(train)} image; a node needs two or more to train", "label a few more"
        )
    elif len(looks) == len(train) and not class_folders.enough(counts):
        rarest = min(counts, key=lambda name: counts[name])
        yield Finding(
            "warning",
            "too few",
            f"{len(train)} images, {counts[rarest]} of them of {rarest}, are too few to hold any out; the model will"
            " be judged by cross-validation, whose interval is wide",
            f"label more, to {class_folders.LEAST} and {class_folders.LEAST_PER_CLASS} of each class,"
            " or bring --test FOLDER",
        )


def _classes(looks: Looks) -> Found:
    """One class only, classes that only one side has, or far more images of one class than of another."""
    counts, held_out = (_counts([each for each in looks if each.held_out == side]) for side in (False, True))
    if len(counts) == 1:
        (name,) = counts
        yield Finding(
            "warning", "one class", f"all images are of {name}; there is nothing to tell apart", "add another class"
        )
    if unknown := sorted(set(held_out) - set(counts)):
        yield Finding(
            "warning",
            "classes",
            f"there are held-out images of {listing(unknown)}, but none to train with; they will all be judged wrong",
            "add such images to the training folder, or remove them from the held-out ones",
        )
    if held_out and (untested := sorted(set(counts) - set(held_out))):
        yield Finding(
            "hint",
            "classes",
            f"there are no held-out images of {listing(untested)}; nothing will tell how well they are recognised",
            "hold some out",
        )
    (most, many), (least, few) = counts.most_common(1)[0], counts.most_common()[-1]
    if many >= _IMBALANCE * few:
        yield Finding(
            "hint",
            "imbalance",
            f"{most} has {many} images, {least} only {few}; a rare class is learnt last, and accuracy hardly shows it",
            f"label more of {least}",
        )


def _duplicates(looks: Looks) -> Found:
    """The same pixels twice: held out and among the training images, in two classes, or in one."""
    alike: dict[bytes, list[Look]] = defaultdict(list)
    for each in looks:
        alike[each.pixels].append(each)
    groups = [group for group in alike.values() if len(group) > 1]
    leaked = [group for group in groups if len({each.held_out for each in group}) == 2]
    across = [group for group in groups if group not in leaked and len({each.class_name for each in group}) > 1]
    within = [group for group in groups if group not in leaked and group not in across]
    if leaked:
        yield Finding(
            "error",
            "held out",
            f"{len(leaked)} image(s) are among both the training and the held-out images:"
            f"{class_folders.equal(_paths(leaked))}",
            "remove each from one of the two folders",
            names(itertools.chain(*_paths(leaked))),
        )
    if across:
        yield class_folders.in_two_classes(_paths(across))
    if within:
        yield Finding(
            "warning",
            "twice",
            f"{len(within)} image(s) are stored more than once, as different files, and count as often:"
            + class_folders.equal(_paths(within)),
            "remove the copies: one may be held out while another trains",
            names(itertools.chain(*_paths(within))),
        )


def _paths(groups: Sequence[Looks]) -> list[list[Path]]:
    return [[each.path for each in group] for group in groups]


def _near_duplicates(looks: Looks) -> Found:
    """Images that look nearly the same, without being so."""
    if len(looks) > _MOST_COMPARED:
        return
    gradients = np.stack([each.gradients for each in looks])
    pairs = []
    for start in range(0, len(looks), 512):
        likeness = gradients[start : start + 512] @ gradients.T
        for row, column in np.argwhere(likeness > _ALIKE):
            if start + row < column and looks[start + row].pixels != looks[column].pixels:
                pairs.append((-likeness[row, column], start + row, column))
    if pairs:
        pairs.sort()
        shown = [f"{looks[one].path} ~ {looks[other].path}" for _, one, other in pairs]
        files = dict.fromkeys(looks[position].path for _, *pair in pairs for position in pair)
        yield Finding(
            "hint",
            "alike",
            f"{len(files)} of {len(looks)} images look nearly like another one:{lines(shown)}",
            "look at them: pictures of one spot belong on one side, training or held out; all is well if the camera"
            " always sees the same part",
            names(files),
        )


def _sizes(looks: Looks, size: int) -> Found:
    """Images that lose something when they are brought to the network's size."""
    sizes = Counter(each.size for each in looks)
    told = listing([f"{name} ({count})" for name, count in sizes.most_common()])
    small = [each for each in looks if size >= _UPSCALED * min(each.width, each.height)]
    large = [each for each in looks if min(each.width, each.height) >= _SHRUNK * size]
    ratios = [each.width / each.height for each in looks]
    if small:
        yield Finding(
            "warning",
            "too small",
            f"{len(small)} image(s) are far smaller than the network's input of {size} x {size}, and are enlarged:"
            f"{lines([f'{each.path} ({each.size})' for each in small])}",
            "bring images of a higher resolution, or let the coordinator choose a smaller --size",
            names(each.path for each in small),
        )
    if large:
        factor = max(min(each.width, each.height) for each in large) // size
        yield Finding(
            "hint",
            "too large",
            f"{len(large)} image(s) are shrunk up to {factor} times to {size} x {size}; a defect less than {factor}"
            " pixels wide vanishes",
            "crop the images around what matters, in the same way on the line",
            names(each.path for each in large),
        )
    if max(ratios) >= _SQUASHED * min(ratios):
        yield Finding(
            "warning",
            "squashed",
            f"images have different proportions, and each is squashed into a square: {told}",
            "crop all images to the same proportions",
        )
    elif len(sizes) > 1:
        yield Finding(
            "hint",
            "sizes",
            f"images have different sizes: {told}",
            "see whether they come from one camera with one setting",
            names(each.path for each in looks if each.size != sizes.most_common(1)[0][0]),
        )
    elif max(ratios[0], 1 / ratios[0]) >= _SQUASHED:
        yield Finding(
            "hint",
            "squashed",
            f"images of {told} are squashed into a square",
            "nothing, if the line's images have the same proportions",
        )


def _brightness(looks: Looks) -> Found:
    """Images that show nothing, or that are far darker or brighter than the others."""
    empty = [each for each in looks if each.contrast < _FLAT or not _BLACK <= each.brightness <= _WHITE]
    if empty:
        yield Finding(
            "warning",
            "empty",
            f"{len(empty)} image(s) are black, white or of one gray, and show nothing:"
            + lines([f"{each.path} (mean {each.brightness:.0f})" for each in empty]),
            "remove them, and see to the light or the camera",
            names(each.path for each in empty),
        )
    shown = [each for each in looks if each not in empty]
    usual = {name: _usual([each for each in shown if each.class_name == name]) for name in _counts(shown)}
    over_all = _usual(shown) if shown else (0.0, np.inf)
    odd = [
        each
        for each in shown
        if any(abs(each.brightness - m) > limit for m, limit in (usual[each.class_name], over_all))
    ]
    if odd:
        yield Finding(
            "hint",
            "brightness",
            f"{len(odd)} image(s) are far darker or brighter than others:"
            + lines(
                [f"{each.path} (mean {each.brightness:.0f}, usual {usual[each.class_name][0]:.0f})" for each in odd]
            ),
            "see whether they were taken in the same light, with the same exposure",
            names(each.path for each in odd),
        )


def _usual(looks: Looks) -> tuple[float, float]:
    """The median brightness, and the deviation from it that makes an outlier."""
    values = np.array([each.brightness for each in looks])
    if len(values) < _LEAST_TO_COMPARE:
        return float(np.median(values)), np.inf
    median = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - median)))  # of a normal distribution, the standard deviation
    return median, max(_OUTLIER * deviation, _LEAST_DEVIATION)


def _leaks(looks: Looks) -> Found:
    """Formats that occur in one class only: a network may learn them instead of the defect."""
    counts = _counts(looks)
    for what, values in (
        ("file type", [each.format for each in looks]),
        ("size", [each.size for each in looks]),
        ("colour mode", [each.mode for each in looks]),
        ("camera", [each.camera or "no camera's name" for each in looks]),
    ):
        owners: dict[str, list[Look]] = defaultdict(list)
        for value, each in zip(values, looks, strict=True):
            owners[value].append(each)
        telling = {
            value: group
            for value, group in owners.items()
            if len({each.class_name for each in group}) == 1
            and (counts[group[0].class_name] / len(looks)) ** len(group) < _CHANCE
        }
        if telling:
            told = [
                f"all {len(group)} images with {value} are of {group[0].class_name}" for value, group in telling.items()
            ]
            yield Finding(
                "warning",
                "giveaway",
                f"the {what} gives a class away: {listing(told, '; ')}",
                "take and save the images of all classes in the same way; else a network may learn the traces of that,"
                " and fail on the line",
                names(each.path for group in telling.values() for each in group),
            )
