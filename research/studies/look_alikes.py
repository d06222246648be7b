"""Look-alikes that are found, and different spots that are taken for some: made changes,
and real views of cloth.

    python -m research.studies.look_alikes NEU XSDD --kth KTH

prints, on each folder's tuning pool, how many of `--images` changed copies are found for each kind
of change, and which pairs of different files are; with `--weights` the same for features of a
network, at the threshold that one of 1,000 pairs of one class passes; and of KTH-TIPS2
(`sample_*/CLASS/*scale_S_im_N*`) the pairs found, by how views differ.
"""

import argparse
import io
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from research.studies.linear_probe import features
from trainer.data import class_folders, partition
from trainer.data.checks.likeness import find_alike, make_thumbnail
from trainer.data.class_folders import LabelledImages
from trainer.data.folder_scan import Entry

Picture = Image.Image
_RANDOM = np.random.default_rng(0)


def _noise(image: Picture) -> Picture:
    values = np.asarray(image) + _RANDOM.normal(0, 8, image.size[::-1])
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def _compress(image: Picture) -> Picture:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=30)
    return Image.open(file).convert("L")


def _crop(share: float) -> Callable[[Picture], Picture]:
    def crop(image: Picture) -> Picture:
        width, height = (round(share * side) for side in image.size)
        left, top = (
            int(_RANDOM.integers(0, most + 1))
            for most in (image.width - width, image.height - height)
        )
        return image.crop((left, top, left + width, top + height)).resize(image.size)

    return crop


def _turn(degrees: float) -> Callable[[Picture], Picture]:
    return lambda image: image.rotate(
        degrees, Image.Resampling.BILINEAR, fillcolor=int(np.asarray(image).mean())
    )


def _move(share: float) -> Callable[[Picture], Picture]:
    """A window of 4/5 of each side, `share` of its own side from the middle."""

    def move(image: Picture) -> Picture:
        angle = _RANDOM.uniform(0, 2 * np.pi)
        return _window(image, share * np.cos(angle), share * np.sin(angle))

    return move


def _window(image: Picture, right: float = 0, down: float = 0) -> Picture:
    width, height = round(0.8 * image.width), round(0.8 * image.height)
    left = round(min(max((image.width - width) / 2 + right * width, 0), image.width - width))
    top = round(min(max((image.height - height) / 2 + down * height, 0), image.height - height))
    return image.crop((left, top, left + width, top + height))


CHANGES: dict[str, Callable[[Picture], Picture]] = {
    "noise of 8 gray values": _noise,
    "0.6 times as bright": lambda image: image.point(lambda value: 0.6 * value),
    "1.5 times as bright": lambda image: image.point(lambda value: min(255, 1.5 * value)),
    "gamma 1.8": lambda image: image.point(lambda value: 255 * (value / 255) ** 1.8),
    "JPEG of quality 30": _compress,
    "mirrored": ImageOps.mirror,
    "turned by 90 degrees": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "turned by 7 degrees": _turn(7),
    "cropped to 90 %": _crop(0.9),
    "cropped to 80 %": _crop(0.8),
    "moved by 5 % of a side": _move(0.05),
    "moved by 10 %": _move(0.1),
}


def examine(folder: Path, count: int, weights: str) -> None:
    """Print what is found in the folder's tuning pool."""
    entries = partition.select_pool(class_folders.scan(folder), "tuning").entries
    images = [Image.open(entry.path).convert("L") for entry in entries]
    started = time.process_time()
    found = find_alike([make_thumbnail(image) for image in images])
    same = sum(n * (n - 1) // 2 for n in Counter(entry.class_name for entry in entries).values())
    print(
        f"{folder.name}: {len(images)} images, {same} pairs of one class, "
        f"{time.process_time() - started:.1f} s of CPU"
    )
    for pair in found:
        print(
            f"  {entries[pair.one].path.name} ~ {entries[pair.other].path.name}: "
            f"{pair.likeness:.2f}"
        )
    chosen = np.random.default_rng(1).choice(len(images), min(count, len(images)), replace=False)
    threshold = _feature_threshold(entries, images, weights) if weights else 0.0
    for name, change in CHANGES.items():
        pairs = [
            (_window(images[at]) if name.startswith("moved") else images[at], change(images[at]))
            for at in chosen
        ]
        hits = sum(
            bool(find_alike([make_thumbnail(one), make_thumbnail(other)])) for one, other in pairs
        )
        text = f"  {name}: {hits} of {len(pairs)}"
        if weights:
            ours, theirs = (_features([pair[side] for pair in pairs], weights) for side in (0, 1))
            text += f"; by features {int(((ours * theirs).sum(1) > threshold).sum())}"
        print(text, flush=True)


def _features(images: Sequence[Picture], weights: str) -> np.ndarray:
    """Features [n, d] of length 1."""
    pixels = np.stack([np.asarray(image.resize((96, 96)).convert("RGB")) for image in images])
    found = features(
        "mobilenet_v2", weights, LabelledImages(pixels, np.zeros(len(pixels), np.int64), (), ())
    )
    normed: np.ndarray = found / np.linalg.norm(found, axis=1, keepdims=True)
    return normed


def _feature_threshold(
    entries: Sequence[Entry], images: Sequence[Picture], weights: str, most: int = 240
) -> float:
    chosen = range(0, len(images), max(1, len(images) // most))
    found = _features([images[at] for at in chosen], weights)
    classes = np.array([entries[at].class_name for at in chosen])
    one, other = np.triu_indices(len(chosen), 1)
    return float(np.quantile((found @ found.T)[one, other][classes[one] == classes[other]], 0.999))


def examine_cloth(folder: Path) -> None:
    """Print the pairs found among views of cloth, of all pairs, by how the views differ."""
    files = sorted(folder.glob("sample_*/*/*scale_*_im_*"))
    views = [_view(file) for file in files]
    found = Counter(
        _difference(views[pair.one], views[pair.other])
        for pair in find_alike([make_thumbnail(Image.open(file).convert("L")) for file in files])
    )
    there = Counter(_difference(one, other) for one, other in itertools.combinations(views, 2))
    for what, count in there.items():
        print(f"{folder.name}, {what}: {found[what]} of {count} pairs", flush=True)


_View = tuple[str, str, int, int, int]  # class, piece, distance, pose, light


def _view(file: Path) -> _View:
    match = re.search(r"scale_(\d+)_im_(\d+)", file.name)
    assert match is not None
    scale, number = int(match[1]), int(match[2]) - 1
    # the last three are in ambient light
    pose, light = divmod(number, 3) if number < 9 else (number - 9, 3)
    return file.parent.name, file.parts[-3], scale, pose, light


def _difference(one: _View, other: _View) -> str:
    if one[0] != other[0]:
        return "other class"
    if one[1] != other[1]:
        return "other piece of the class"
    if one[2:4] == other[2:4]:
        return "one view, other light"
    if one[2] == other[2]:
        return "other pose"
    return "next distance" if abs(one[2] - other[2]) == 1 else "other distance"


def main() -> None:
    """Print what is found in each folder, and among views of cloth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="class folders")
    parser.add_argument("--kth", type=Path, help="KTH-TIPS2: sample_*/CLASS/")
    parser.add_argument("--images", type=int, default=120, help="changed copies of each kind")
    parser.add_argument(
        "--weights", default="", help="of MobileNetV2, to compare with: surface, imagenet or a file"
    )
    asked = parser.parse_args()
    for folder in asked.folders:
        examine(folder, asked.images, asked.weights)
    if asked.kth:
        examine_cloth(asked.kth)


if __name__ == "__main__":
    main()
