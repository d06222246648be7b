"""Classification of many image files without a daemon,
and the result file from which an interrupted run resumes.
"""

import csv
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import EdgeNodeError, UsageError, replace_unprintable
from broker_config.protocol.names import show_name
from broker_config.storage.checksums import digest_of
from edge.bundle.bundle_format import Manifest, short_digest
from edge.inference.class_prior import Prior
from edge.inference.image_decoding import SUFFIXES, drop_annotated
from edge.inference.outcomes import Failure, Verdict
from edge.inference.pipeline import Frame, Inspection, Monitor, NullConsumer, Pipeline
from edge.inference.served_model import Model
from edge.inference.tiling import View
from edge.terminal.formatting import natural_key, plain_cell, read_cell

COLUMNS = (
    "image",
    "label",
    "confidence",
    "defect",
    "taught",
    "doubts",
    "bundle",
    "model",
    "view",
    "time",
    "error",
)
_READABLE = 200  # bytes of an image's name that its picture's name keeps
_HEADER = ",".join(COLUMNS) + "\n"


class Image(NamedTuple):
    """An image file and its name."""

    name: str
    path: Path


def find_images(paths: Sequence[Path]) -> list[Image]:
    """The image files among `paths`: the files themselves,
    and all image files in folders and below, sorted by name.

    In folders hidden and annotated ones are left out. UsageError when a folder holds none.
    """
    found = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = drop_annotated(sorted(_walk(path), key=lambda each: natural_key(str(each))))
        if not inside:
            raise UsageError(
                f"there are no images in {path}",
                f"name a folder that holds files with {' '.join(SUFFIXES)}",
            )
        found += [Image(show_name(each), each) for each in inside]
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".")]
        for each in files:
            if not each.startswith(".") and Path(each).suffix.lower() in SUFFIXES:
                yield Path(place, each)


class FolderLabels(NamedTuple):
    """Classes of images by the folders that they lie in."""

    # by the image's name; empty unless each folder is named as one of the model's classes
    truths: dict[str, str]
    unknown: tuple[str, ...]  # folders that are not, where others are


def read_folder_labels(images: Sequence[Image], classes: Sequence[str]) -> FolderLabels:
    """Take images for labelled if all lie in folders named as the model's classes."""
    folders = {image.name: image.path.absolute().parent.name for image in images}
    unknown = sorted(set(folders.values()) - set(classes))
    if not unknown:
        return FolderLabels(folders, ())
    strangers = tuple(unknown) if set(folders.values()) & set(classes) else ()
    return FolderLabels({}, strangers)


def count_known(images: Sequence[Image], manifest: Manifest) -> int:
    """How many of the images trained the model, as far as its manifest tells."""
    known = set(manifest.trained_on)
    found = 0
    labelled = images if known else ()
    for image in labelled:
        with suppress(OSError):  # it has been told as a failure
            found += short_digest(digest_of(image.path)) in known
    return found


def classify_images(
    model: Model,
    images: Sequence[Image],
    view: View | None = None,
    prior: Prior | None = None,
    monitors: Sequence[Monitor] = (),
) -> Iterator[Inspection | Failure]:
    """Inspect images one after another; each verdict goes through the `monitors`.

    Raises:
        UsageError: view or prior name a class that the model does not have.
    """
    pipeline = Pipeline(model, NullConsumer(), view, monitors, prior)
    for name, path in images:
        yield pipeline.inspect_sync(Frame(name, path))


class _Row(Struct):
    """The columns of an earlier result that matter here."""

    image: str
    model: str = ""  # empty: the image could not be classified
    view: str = ""
    label: str = ""
    defect: bool | int | str = ""  # CSV: 0 or 1
    doubts: tuple[str, ...] | str = ""  # CSV: with spaces between


class EarlierVerdict(NamedTuple):
    """What a result file tells of an image."""

    label: str
    defect: bool
    doubted: bool


class ResultFile:
    """A file of outcomes, JSON lines or CSV by its suffix, to which each outcome adds a line.

    `classified` are the images that have a verdict in it, by name. Failed ones are tried again: an
    image's last line counts.
    """

    def __init__(
        self, path: Path, model: Model, view: View | None = None, prior: Prior | None = None
    ) -> None:
        """Open or create it; UsageError when it has another suffix,
        or results of another model, view or prior.
        """
        self._view = _digest(view or View(), prior or Prior())
        self._kind: Literal["csv", "jsonl"] = "csv" if path.suffix == ".csv" else "jsonl"
        if path.suffix not in (".csv", ".jsonl"):
            raise UsageError(
                f"{path} is neither .jsonl nor .csv", "give the file one of these suffixes"
            )
        try:
            mode: Literal["r+b", "w+b"] = "r+b" if path.exists() else "w+b"
            self._file: BinaryIO = path.open(mode)
            content = self._file.read()
        except OSError as error:
            raise EdgeNodeError(
                f"cannot write results to {path}: {error.strerror}",
                "name a file in a folder that can be written",
            ) from error
        whole = content[: content.rfind(b"\n") + 1]  # the last line may have been cut off
        try:
            rows = self._rows(whole)
        except (ValueError, msgspec.MsgspecError) as error:
            raise UsageError(
                f"{path} holds something other than results", "name another file"
            ) from error
        if others := {row.model for row in rows if row.model} - {model.digest}:
            raise UsageError(
                f"{path} holds results of another model ({', '.join(sorted(others))}, not "
                f"{model.digest})",
                "name another file",
            )
        if {row.view for row in rows if row.model} - {self._view}:
            raise UsageError(
                f"{path} holds results that were made with another view or prior",
                "name another file, or the same --view and --prior",
            )
        self.classified = {
            row.image: EarlierVerdict(row.label, bool(int(row.defect or 0)), bool(row.doubts))
            for row in rows
            if row.model
        }
        self._file.truncate(len(whole))
        self._file.seek(len(whole))
        if not whole and self._kind == "csv":
            self._write(_HEADER)

    def _rows(self, content: bytes) -> list[_Row]:
        if self._kind == "jsonl":
            return [msgspec.json.decode(line, type=_Row) for line in content.splitlines()]
        text = content.decode()
        if text and not text.startswith(_HEADER):
            raise ValueError("other columns")
        names, *rows = list(csv.reader(io.StringIO(text))) or [[]]
        return [
            msgspec.convert(dict(zip(names, map(read_cell, row), strict=True)), _Row)
            for row in rows
            if row
        ]

    def add(self, outcome: Verdict | Failure) -> None:
        """Append an outcome; EdgeNodeError when it cannot be written."""
        try:
            if self._kind == "jsonl":
                isinstance_ = {"view": self._view} if isinstance(outcome, Verdict) else {}
                row = msgspec.to_builtins(outcome) | isinstance_
                self._write(msgspec.json.encode(row).decode() + "\n")
            else:
                text = io.StringIO()
                row = []
                for cell in _cells(outcome, self._view):
                    shown = plain_cell(cell) if isinstance(cell, str) else cell
                    row.append(shown)
                csv.writer(text, lineterminator="\n").writerow(row)
                self._write(text.getvalue())
        except OSError as error:
            raise EdgeNodeError(
                f"cannot write results to {self._file.name}: {error.strerror}",
                "free some space there; the same command then goes on",
            ) from error

    def _write(self, text: str) -> None:
        self._file.write(text.encode())
        self._file.flush()


def _digest(view: View, prior: Prior) -> str:
    """A short identifier of the settings on which verdicts depend."""
    return hashlib.sha256(msgspec.json.encode((view, prior), order="sorted")).hexdigest()[:12]


def _cells(outcome: Verdict | Failure, view: str) -> list[object]:
    if isinstance(outcome, Failure):
        return [
            outcome.image,
            *[""] * (len(COLUMNS) - 3),
            outcome.time,
            replace_unprintable(outcome.error, keep=""),
        ]
    row = {name: getattr(outcome, name, "") for name in COLUMNS}
    flags = {"defect": int(outcome.defect), "taught": int(outcome.taught)}
    return list((row | flags | {"doubts": " ".join(outcome.doubts), "view": view}).values())


def annotated_path(image: str, folder: Path) -> Path:
    """The path for the annotated picture of an image: unique,
    with a name short enough for any file system.
    """
    readable = image.strip("./").replace("/", "_").encode()[-_READABLE:].decode(errors="ignore")
    return folder / f"{readable}.{hashlib.sha256(image.encode()).hexdigest()[:8]}.annotated.jpg"
