"""Public data sets of surface defects: addresses, licences, checksums, and comparison of a folder with one."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

import msgspec

from broker_config.protocol.errors import UsageError, suggest
from trainer.data.checks import rules
from trainer.data.folder_scan import scan_folder


class Images(msgspec.Struct, frozen=True):
    """The distinct images of a class, by the bytes of their files."""

    number: int
    checksum: str  # SHA-256 of their sorted SHA-256 digests in hexadecimal, one a line


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """A public data set. Fields stay empty where the facts could not be verified."""

    name: str
    title: str
    licence: str
    citation: str
    home: str  # URL of its authors' page
    by_hand: str  # URL of a page for downloading it in a browser
    archive: str  # URL of a ZIP file that needs no login
    md5: str  # of that file, as its publisher states it
    classes: Mapping[str, Images | None]
    aliases: Mapping[str, str]  # other names of its classes, in folders or before the number in files' names

    @property
    def verifiable(self) -> bool:
        """Whether its images' checksums are known."""
        return None not in self.classes.values()

    def class_of(self, path: PurePath) -> str | None:
        """The class of an image: of the nearest folder that is named like one, else of the name before the number."""
        known = {_normalise(name): name for name in self.classes} | dict(self.aliases)
        for word in (*reversed(path.parts[:-1]), path.stem.rpartition("_")[0]):
            if _normalise(word) in known:
                return known[_normalise(word)]
        return None


def _normalise(word: str) -> str:
    return re.sub(r"[ _-]+", "_", word.strip().lower())


NEU_CLS = Dataset(
    name="neu-cls",
    title="NEU surface defect database for classification (hot-rolled steel strip)",
    licence="for research, citing the paper (its authors); CC BY 4.0 (the copy on Figshare)",
    citation="K. Song, Y. Yan, A noise robust method based on completed local binary patterns for hot-rolled steel"
    " strip surface defects, Applied Surface Science 285 (2013) 858-864",
    home="http://faculty.neu.edu.cn/songkechen/zh_CN/zdylm/263270/list/",
    by_hand="https://figshare.com/articles/dataset/NEU-CLS/28903550",
    archive="https://ndownloader.figshare.com/files/54094775",
    md5="19af5a1250d8ab0cb0828d31ee2b349d",
    classes={
        "crazing": Images(300, "189ae12ccb8b814dc10fcc2eaf90f2386ab61f88c3eb3e28837639d096ca8372"),
        "inclusion": Images(300, "d21a68970c3d153ef42ea0dfff29108034a1e228d64c7d1aa69865dc13aaa63e"),
        "patches": Images(299, "414f639fcdc6b009f810b2566ae7c0094d6045048f8a9986ab64c86feb186be8"),
        "pitted_surface": Images(300, "d1432b415cc77cd527eb6d45b94e062c6afcb93eb4e29050f0e596a1aa192ad2"),
        "rolled-in_scale": Images(300, "14c26d6565dde73e69bfa8e8cce1f7acad8f2762e3047ef09f3daea1a4557fb1"),
        "scratches": Images(300, "d4eaca6e21c19703452badb13c68f86dd60728bf7a16a3b90c54a10cd7ea13e8"),
    },
    aliases={
        "cr": "crazing",
        "in": "inclusion",
        "pa": "patches",
        "ps": "pitted_surface",
        "rs": "rolled-in_scale",
        "sc": "scratches",
    },
)

X_SDD = Dataset(
    name="x-sdd",
    title="Xsteel surface defect dataset (hot-rolled steel strip)",
    licence="Apache-2.0 (the LICENSE file beside the copy that the checksums are of)",
    citation="X. Feng, X. Gao, L. Luo, X-SDD: A New Benchmark for Hot Rolled Steel Strip Surface Defects Detection,"
    " Symmetry 13 (2021) 706, https://doi.org/10.3390/sym13040706",
    home="https://github.com/Fighter20092392/X-SDD-A-New-benchmark",
    by_hand="https://github.com/Fighter20092392/X-SDD-A-New-benchmark",
    archive="https://github.com/Fighter20092392/X-SDD-A-New-benchmark/archive/029895ed915859dec11e79a70230bf85cfaf91cf.zip",
    md5="",  # GitHub packs archives anew
    classes={
        "finishing_roll_printing": Images(203, "9e897c1bf00190a1c8dcaecce9009e6cb8d668bcd4fa5f86e6aaefb64b763852"),
        "iron_sheet_ash": Images(122, "783f410b1754607e273f2dd59dabc0e566f7035a86c1a9a3b488fbd4b0ffe641"),
        "oxide_scale_of_plate_system": Images(63, "f3f8c771dffe3977709711ae94b765f7e6db1b41589a9c10260104bc83bbb7fd"),
        "oxide_scale_of_temperature_system": Images(
            203, "a44c0c882b103012eec66d4ba2dd2c3d9f0756e9818366a25ccebb30bd073c80"
        ),
        "red_iron": Images(388, "241ef1aa343e23039535ca14f88d5cc1b3516d6bd794763d2e822b9b67b0b030"),
        "slag_inclusion": Images(238, "806ae4ade9a9f09990e733435967f312d036777d49c7a26ab829ca045c74a6a8"),
        "surface_scratch": Images(134, "8bdee7e0420743c94439b06a96d6eb235660d4f3aae03e8f3381fce7a512c48a"),
    },
    aliases={},
)

_GC10 = (
    "punching_hole", "welding_line", "crescent_gap", "water_spot", "oil_spot", "silk_spot", "inclusion", "rolled_pit",
    "crease", "waist_folding",
)  # fmt: skip  # in the order of its folders 1 to 10

GC10_DET = Dataset(
    name="gc10-det",
    title="GC10-DET (metal surfaces)",
    licence="none stated; its authors welcome use and ask to be cited",
    citation="X. Lv, F. Duan, J. Jiang, X. Fu, L. Gan, Deep Metallic Surface Defect Detection: The New Benchmark and"
    " Detection Network, Sensors 20 (2020) 1562, https://doi.org/10.3390/s20061562",
    home="https://github.com/lvxiaoming2019/GC10-DET-Metallic-Surface-Defect-Datasets",
    by_hand="https://www.kaggle.com/datasets/alex000kim/gc10det",
    archive="",
    md5="",
    classes=dict.fromkeys(_GC10),
    aliases={str(number): name for number, name in enumerate(_GC10, 1)},
)

DATASETS = {each.name: each for each in (NEU_CLS, X_SDD, GC10_DET)}


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
    sizes = {name: f" {images.number}" if images else "" for name, images in dataset.classes.items()}
    got = f"edge-node dataset {dataset.name} --out FOLDER" if dataset.archive else "by hand only (it needs a login)"
    verified = "by the checksums of its images" if dataset.verifiable else "not verified: no checksums are known"
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
        name, size = self.dataset.name, f"{sum(self.counts.values()):,} different images of {len(self.counts)} classes"
        if self.differences:
            text = "\n  ".join([f"this is not {name} ({size}):", *self.differences])
        elif self.dataset.verifiable:
            text = f"this is {name}, image by image: {size}"
        else:
            text = f"this has the classes of {name}: {size}; its checksums are not known"
        left_out = f"\n{self.left_out} image file(s) of no class of {name}, or of two, were left out"
        return text + (left_out if self.left_out else "")

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
    differences = [_describe_difference(name, images, found.get(name, [])) for name, images in dataset.classes.items()]
    differences += [f"{name}: {len(found[name])} image(s) too many, no class of this data set" for name in sorted(found)
             if name not in dataset.classes]  # fmt: skip
    differences += [finding.text for finding in rules.check_folder(scanned) if finding.kind != "twice"]
    counts = {name: len(digests) for name, digests in sorted(found.items())}
    return Comparison(dataset, counts, [text for text in differences if text])


def _describe_difference(name: str, expected: Images | None, digests: list[str]) -> str:
    if not digests:
        return f"{name}: the class is missing"
    if expected is None or expected == Images(len(digests), compute_checksum(digests)):
        return ""
    if difference := len(digests) - expected.number:
        words = "too many" if difference > 0 else "missing"
        return f"{name}: {abs(difference)} image(s) {words}, {len(digests)} instead of {expected.number}"
    return f"{name}: {expected.number} images, but not the same files (changed, or saved in another format)"
