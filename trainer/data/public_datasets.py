"""Public data sets of surface defects: descriptions, and comparison of a folder with one."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from broker_config.protocol.errors import UsageError, suggest
from trainer.data.checks import image_rules
from trainer.data.datasets import DATASETS
from trainer.data.datasets.dataset import Dataset, Images
from trainer.data.folder_scan import scan_folder


def find_dataset(name: str) -> Dataset:
    """The data set of that name. Raises UsageError if there is none."""
    if name not in DATASETS:
        raise UsageError(f"no public data set is called {name!r}", suggest(name, DATASETS))
    return DATASETS[name]


def compute_checksum(digests: Iterable[str]) -> str:
    """Checksum of a set of images, from their SHA-256 digests in any order."""
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def format_description(dataset: Dataset) -> str:
    """The data set's description, licence and source, in several lines."""
    sizes = {}
    for name, images in dataset.classes.items():
        sizes[name] = f" {images.number}" if images else ""
    got = (
        f"edge-node dataset {dataset.name} --out FOLDER"
        if dataset.archive
        else "by hand only (it needs a login)"
    )
    verified = (
        "by the checksums of its images"
        if dataset.verifiable
        else "not verified: no checksums are known"
    )
    return f"""{dataset.name}: {dataset.title}
  images    {", ".join(name + size for name, size in sizes.items())}
  licence   {dataset.licence}
  cite      {dataset.citation}
  home      {dataset.home}
  page      {dataset.by_hand}
  download  {got}
  verified  {verified}"""


class Comparison(NamedTuple):
    """Comparison of a folder with the data set that it should hold."""

    dataset: Dataset
    counts: dict[str, int]  # different images of each class
    differences: list[str]  # in words; empty if they are the same
    left_out: int = 0  # image files of no class of the data set, or of two

    @property
    def verdict(self) -> str:
        """The outcome as a sentence, and a line for each difference."""
        name = self.dataset.name
        size = f"{sum(self.counts.values()):,} different images of {len(self.counts)} classes"
        if self.differences:
            text = "\n  ".join([f"this is not {name} ({size}):", *self.differences])
        elif self.dataset.verifiable:
            text = f"this is {name}, image by image: {size}"
        else:
            text = f"this has the classes of {name}: {size}; its checksums are not known"
        left_out = (
            f"\n{self.left_out} image file(s) of no class of {name}, or of two, were left out"
        )
        remark = left_out if self.left_out else ""
        return text + remark

    @property
    def facts(self) -> dict[str, object]:
        """The outcome for machines."""
        checked = self.dataset.verifiable and not self.differences
        return {
            "dataset": self.dataset.name,
            "verified": checked,
            "images": self.counts,
            "differences": self.differences,
            "left_out": self.left_out,
        }


def compare_folder(dataset: Dataset, folder: Path) -> Comparison:
    """Compare class folders with the data set, image by image.

    Raises:
        UsageError: there is no such folder.
    """
    scanned = scan_folder(folder)
    found: dict[str, list[str]] = defaultdict(list)
    for entry in scanned.entries:
        found[entry.class_name].append(entry.digest)
    differences = [
        _describe_difference(name, images, found.get(name, []))
        for name, images in dataset.classes.items()
    ]
    differences += [
        f"{name}: {len(found[name])} image(s) too many, no class of this data set"
        for name in sorted(found)
        if name not in dataset.classes
    ]
    differences += [
        finding.text for finding in image_rules.check_folder(scanned) if finding.kind != "twice"
    ]
    counts = {name: len(digests) for name, digests in sorted(found.items())}
    return Comparison(dataset, counts, [text for text in differences if text])


def _describe_difference(name: str, expected: Images | None, digests: list[str]) -> str:
    if not digests:
        return f"{name}: the class is missing"
    if expected is None or expected == Images(len(digests), compute_checksum(digests)):
        return ""
    if difference := len(digests) - expected.number:
        words = "too many" if difference > 0 else "missing"
        return (
            f"{name}: {abs(difference)} image(s) {words}, {len(digests)} instead of "
            f"{expected.number}"
        )
    return (
        f"{name}: {expected.number} images, but not the same files (changed, or saved in another "
        "format)"
    )
