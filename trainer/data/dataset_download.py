"""Download of a public data set, its verification, and its layout as class folders."""

import hashlib
import http.client
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.storage.disk import writing
from edge.inference.image_decoding import MAX_BYTES, SUFFIXES
from trainer.data.datasets.dataset import Dataset
from trainer.data.public_datasets import Comparison, compare_folder

_TIMEOUT = 30  # seconds without a byte
_CHUNK = 1 << 18  # bytes

TrackChunks = Callable[[Iterable[bytes], int], Iterable[bytes]]
"""Passes chunks through, showing progress; the total [bytes] is 0 if unknown."""


@contextmanager
def show_progress(console: Console) -> Iterator[TrackChunks]:
    """A progress bar, in a terminal."""
    columns = (
        TextColumn("downloading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:

        def watch(chunks: Iterable[bytes], total: int) -> Iterator[bytes]:
            task = progress.add_task("", total=total or None)
            for chunk in chunks:
                yield chunk
                progress.advance(task, len(chunk))

        yield watch


def fetch_dataset(dataset: Dataset, origin: str, out: Path, watch: TrackChunks) -> Comparison:
    """Lay the data set out as class folders in `out`.

    A download from the data set's own address must match it, or nothing is kept. What the user
    supplies (`origin`) is laid out as it is, and compared.

    Args:
        dataset: which.
        origin: URL of a ZIP file, a ZIP file or a folder; empty for the data set's own address.
        out: a folder that does not exist, or is empty.
        watch: shows the download's progress.

    Raises:
        EdgeNodeError: it cannot be downloaded, or does not match; nothing is left in `out`.
    """
    if not (origin or dataset.archive):
        raise UsageError(
            f"{dataset.name} cannot be downloaded without a login", _manual_remedy(dataset)
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not an empty folder", "name a folder that does not exist yet")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            named = origin or dataset.archive
            source = _locate(dataset, named, Path(scratch) / "archive", watch)
            if not origin and dataset.md5:
                _check_md5(dataset, source)
            laid = Path(scratch) / "images"
            files = _read_folder(source) if source.is_dir() else _read_archive(source, named)
            left_out = _lay_out(dataset, files, laid, named)
            outcome = compare_folder(dataset, laid)
            if outcome.differences and not origin:
                raise EdgeNodeError(
                    f"what {dataset.archive} holds is not {dataset.name}: "
                    f"{'; '.join(outcome.differences)}",
                    f"it may have changed; {_manual_remedy(dataset)}",
                )
            laid.replace(out)
    return outcome._replace(left_out=left_out)


def _manual_remedy(dataset: Dataset) -> str:
    return (
        f"download it from {dataset.by_hand}, then pass the ZIP file or the unpacked folder: "
        f"edge-node dataset {dataset.name} --from FILE --out FOLDER"
    )


def _locate(dataset: Dataset, origin: str, target: Path, watch: TrackChunks) -> Path:
    """The origin as a file or folder here; a URL is downloaded to `target`."""
    if origin.startswith(("http://", "https://")):
        with target.open("wb") as file:
            file.writelines(_download(dataset, origin, watch))
        return target
    path = Path(origin)
    if not path.exists():
        raise UsageError(f"{path} does not exist", "pass a ZIP file, a folder or a URL as --from")
    return path


def _download(dataset: Dataset, url: str, watch: TrackChunks) -> Iterator[bytes]:
    done = 0
    try:
        # Http or https
        request = urllib.request.Request(url, headers={"User-Agent": "edge-node"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:  # noqa: S310
            total = response.length or 0
            for chunk in watch(iter(lambda: response.read(_CHUNK), b""), total):
                done += len(chunk)
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if type(error) is urllib.error.URLError else error
        raise EdgeNodeError(
            f"{url} cannot be downloaded: {reason}",
            f"try again with internet access; or {_manual_remedy(dataset)}",
        ) from error
    if done < total:
        raise EdgeNodeError(
            f"{url} ended after {done:,} of {total:,} bytes",
            f"try again; or {_manual_remedy(dataset)}",
        )


def _check_md5(dataset: Dataset, file: Path) -> None:
    with file.open("rb") as content:
        found = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != dataset.md5:
        raise EdgeNodeError(
            f"{dataset.archive} is not the file that it should be: its MD5 is {found}, not "
            f"{dataset.md5}",
            f"try again; or {_manual_remedy(dataset)}",
        )


def _read_folder(folder: Path) -> Iterator[tuple[PurePath, bytes]]:
    """The images below a folder."""
    for path in sorted(folder.rglob("*")):
        if _is_image(path) and path.is_file():
            yield path.relative_to(folder), path.read_bytes()


def _read_archive(file: Path, named: str) -> Iterator[tuple[PurePath, bytes]]:
    """The images in a ZIP file.

    Its paths are never written to: only folder names that are known classes are used.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                path = PurePosixPath(member.filename)
                if _is_image(path):
                    with archive.open(member) as content:
                        yield path, content.read(MAX_BYTES + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UsageError(
            f"{named} is not a whole ZIP file: {error}",
            "download it again, or unpack it and pass the folder",
        ) from error


def _is_image(path: PurePath) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _lay_out(
    dataset: Dataset, files: Iterable[tuple[PurePath, bytes]], out: Path, origin: str
) -> int:
    """Write the images to OUT/CLASS/NAME; return the number left out,
    since they are in no class or in two.
    """
    written: dict[str, list[Path]] = defaultdict(list)
    left_out = 0
    for path, content in files:
        if (name := dataset.class_of(path)) is None or len(content) > MAX_BYTES:
            left_out += 1
            continue
        digest = hashlib.sha256(content).hexdigest()
        target = out / name / path.name
        if target.exists():  # another image of that name, from another folder
            target = target.with_name(f"{digest[:16]}-{path.name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        written[digest].append(target)
    if not written:
        raise UsageError(
            f"there are no images of {dataset.name} in {origin}",
            f"its classes are {', '.join(dataset.classes)}: folders are named so, or files like "
            "crazing_1.jpg",
        )
    for targets in written.values():
        if len({target.parent for target in targets}) > 1:
            left_out += len(targets)
            for target in targets:
                target.unlink()
    return left_out
