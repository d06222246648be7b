"""Blank frames: how often ordinary images are taken for one, and how many made ones are found.

    python -m research.studies.blank_frames NEU-CLS/ X-SDD/ --bundle bundles/plant-1

Ordinary images are those of the class folders, and drawn surfaces of 20 plants. From the images of
the first folder, or at their size, frames are made that show nothing (one gray, a sensor's noise,
light that falls off) or too little (a lens half covered, out of focus). With a bundle that was
trained on that folder, the share of each kind that its novelty doubts, and of those that nothing
doubts: neither `blank` nor novelty nor confidence.
"""

import argparse
import io
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from edge.inference.image_decoding import Photo, read_image
from edge.inference.outcomes import Box
from edge.inference.pipeline import Frame, Inspection, NullConsumer, Pipeline
from edge.inference.served_model import load_model
from edge.uncertainty.blank_frame import is_blank
from edge.uncertainty.uncertainty_check import Settings, UncertaintyCheck
from trainer.data import class_folders, drawn_surfaces
from trainer.data.partition import select_pool

COUNT = 60  # frames of a kind
Random = np.random.Generator


def _frame(values: np.ndarray, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(
        np.broadcast_to(values, size[::-1]).round().clip(0, 255).astype(np.uint8)
    ).convert("RGB")


def _compressed(image: Image.Image) -> Image.Image:
    image.save(file := io.BytesIO(), "JPEG", quality=85)
    return Image.open(file).convert("RGB")


def _noisy(random: Random, size: tuple[int, int], level: float, deviation: float) -> Image.Image:
    return _frame(level + random.normal(0, deviation, size[::-1]), size)


def _lit(random: Random, size: tuple[int, int]) -> Image.Image:
    y, x = (np.linspace(-0.5, 0.5, side) for side in size[::-1])
    light = 128 + random.uniform(-40, 40) * x - random.uniform(0, 80) * (x**2 + y[:, None] ** 2)
    return _frame(light + random.normal(0, random.uniform(1, 5), size[::-1]), size)


def _half_covered(random: Random, image: Image.Image) -> Image.Image:
    pixels = np.array(image)
    half = pixels[:, : image.width // 2]
    half[:] = (4 + random.normal(0, 2, half.shape)).clip(0, 255)
    return Image.fromarray(pixels)


def _blurred(image: Image.Image, share: float) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(share * image.width))


# An ordinary image and random numbers -> a frame
KINDS: dict[str, Callable[[Image.Image, Random], Image.Image]] = {
    "one gray, black to white": lambda image, random: _frame(
        np.array(random.integers(0, 256)), image.size
    ),
    "black": lambda image, _: _frame(np.array(0), image.size),
    "saturated": lambda image, _: _frame(np.array(255), image.size),
    "gray, noise 1 to 5": lambda image, random: _noisy(
        random, image.size, random.uniform(20, 235), random.uniform(1, 5)
    ),
    "the same as JPEG": lambda image, random: _compressed(
        _noisy(random, image.size, random.uniform(20, 235), random.uniform(1, 5))
    ),
    "light that falls off, noise 1 to 5": lambda image, random: _lit(random, image.size),
    "uniform noise": lambda image, random: _frame(
        random.integers(0, 256, image.size[::-1]), image.size
    ),
    "normal noise, 10 to 80": lambda image, random: _noisy(
        random, image.size, 128, random.uniform(10, 80)
    ),
    "noise of neighbours, 2 to 20": lambda image, random: _noisy(
        random, image.size, 128, random.uniform(2, 20)
    ).filter(ImageFilter.Kernel((3, 3), (1, 2, 1, 2, 4, 2, 1, 2, 1))),
    "lens half covered": lambda image, random: _half_covered(random, image),
    "out of focus by 1/25 of the width": lambda image, _: _blurred(image, 0.04),
    "out of focus by 1/6 of the width": lambda image, _: _blurred(image, 1 / 6),
}


def blank(image: Image.Image) -> bool:
    """Whether a whole image is taken for blank."""
    return is_blank(Photo(image, "", image.mode, ""), Box(0, 0, *image.size))


def ordinary(folder: Path, pool: str) -> list[Image.Image]:
    """The images of class folders."""
    return [
        read_image(entry.path).image
        for entry in select_pool(class_folders.scan(folder), pool).entries
    ]


def drawn() -> Iterator[Image.Image]:
    """Surfaces of 20 plants, 35 images each."""
    labels = np.arange(len(drawn_surfaces.CLASSES)).repeat(5)
    for plant in range(20):
        yield from map(Image.fromarray, drawn_surfaces.draw_images(labels, 128, 3, plant))


def report_ordinary(name: str, images: Sequence[Image.Image]) -> None:
    """Print how many ordinary images are doubted, and what that takes."""
    start = time.perf_counter()
    found = sum(blank(image) for image in images)
    took = 1000 * (time.perf_counter() - start) / len(images)
    print(
        f"{name:40} {1000 * found / len(images):.1f} of 1,000 blank ({found} of {len(images)}), "
        f"{took:.2f} ms each"
    )


def doubts(bundle: Path, images: Sequence[Image.Image]) -> list[set[str]]:
    """What a line that serves the bundle doubts in each image."""
    line = Pipeline(load_model(bundle), NullConsumer(), monitors=[UncertaintyCheck(Settings())])
    found = [line.inspect_sync(Frame("", np.array(image.convert("RGB")))) for image in images]
    line.close()
    return [set(each.verdict.doubts) for each in found if isinstance(each, Inspection)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="class folders of ordinary images")
    parser.add_argument(
        "--bundle", type=Path, help="a bundle that was trained on the first of them"
    )
    parser.add_argument(
        "--pool", choices=("report", "tuning"), default="report", help="tuning for choices"
    )
    asked = parser.parse_args()
    sources = {folder.name: ordinary(folder, asked.pool) for folder in asked.folders}
    for name, images in {**sources, "drawn surfaces": list(drawn())}.items():
        report_ordinary(name, images)
    random = np.random.default_rng(0)
    originals = sources[asked.folders[0].name]
    some = [originals[index] for index in random.permutation(len(originals))[:COUNT]]
    for kind, make in {"ordinary": lambda image, _: image, **KINDS}.items():
        made = [make(image, random) for image in some]
        line = f"{kind:40} blank {np.mean([blank(image) for image in made]):4.0%}"
        if asked.bundle:
            found = doubts(asked.bundle, made)
            line += f", novelty {np.mean(['novelty' in each for each in found]):4.0%}"
            line += f", no doubt at all {np.mean([not each for each in found]):4.0%}"
        print(line)


if __name__ == "__main__":
    main()
