"""The deployable model, a folder: `model.onnx`, `manifest.json`, `golden.png`. The reader owns the format."""

import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from PIL import Image

from broker_config.disk import writing
from broker_config.errors import UsageError
from broker_config.messages import Digest, Name, Round

FORMAT = 1
MANIFEST = "manifest.json"
CLASSIFIER = "classifier"
_NAMED = 5  # folders that an error proposes

FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z", description="plain: no folders")]


class BundleError(UsageError):
    """A bundle that cannot be served; says which file is at fault and what to do."""


class Input(Struct, frozen=True, kw_only=True):
    """What the graph takes: uint8 RGB images [N, size, size, 3]; scaling and normalising are inside the graph."""

    size: Annotated[int, Meta(ge=1, le=4096)]  # pixels
    name: str = "image"
    layout: Literal["NHWC"] = "NHWC"
    dtype: Literal["uint8"] = "uint8"


class Graph(Struct, frozen=True, kw_only=True):
    """One ONNX file of the bundle."""

    file: FileName
    sha256: Digest


class Golden(Struct, frozen=True, kw_only=True):
    """An image and the probabilities that the graph must give for it, each within `tolerance`."""

    file: FileName
    sha256: Digest
    probabilities: tuple[float, ...]
    tolerance: Annotated[float, Meta(gt=0, le=0.1)] = 1e-3


class Description(Struct, frozen=True, kw_only=True):
    """What an exporter knows about a model: where it comes from, what it takes and gives."""

    federation: str
    run: str
    node: Name
    method: str
    model: str
    round: Round
    classes: Annotated[tuple[str, ...], Meta(min_length=2)]
    input: Input
    output: str = "probabilities"  # float32 [N, classes]
    metrics: dict[str, float] = {}


class Manifest(Description, frozen=True, kw_only=True):
    """`manifest.json`: the description, and the files by their hashes.

    Fields may be added with a default; any other change is a new `format`.
    """

    format: int = FORMAT
    software: str  # version of edge-node that wrote the bundle
    created: str  # ISO 8601, UTC
    roles: dict[str, Graph]
    golden: Golden

    @property
    def id(self) -> str:
        """Short name of this model in verdicts: whose it is, and of which round."""
        return f"{self.node}@{self.round}"


class Bundle(NamedTuple):
    """A verified bundle on disk."""

    folder: Path
    manifest: Manifest


def write(
    folder: Path, description: Description, onnx: bytes, golden: NDArray[np.uint8], probabilities: Sequence[float]
) -> Manifest:
    """Write a bundle, in one step as others see it; a bundle that is there already is replaced.

    `golden` is uint8 [size, size, 3]; `probabilities` is what `onnx` gives for it, one for each class. Raises
    UsageError when `folder` exists and is no bundle.
    """
    size, classes = description.input.size, description.classes
    if golden.shape != (size, size, 3) or golden.dtype != np.uint8 or len(probabilities) != len(classes):
        raise ValueError(f"expected a golden image uint8 [{size}, {size}, 3] and {len(classes)} probabilities")
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise UsageError(f"{folder} exists and is not a bundle", "name a folder that does not exist yet")
    png = io.BytesIO()
    Image.fromarray(golden).save(png, "PNG")
    files = {"model.onnx": onnx, "golden.png": png.getvalue()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = Manifest(
        **{name: getattr(description, name) for name in Description.__struct_fields__},
        software=version("edge-node"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        roles={CLASSIFIER: Graph(file="model.onnx", sha256=digests["model.onnx"])},
        golden=Golden(
            file="golden.png", sha256=digests["golden.png"], probabilities=tuple(float(p) for p in probabilities)
        ),
    )
    with writing(folder):
        _replace(folder, files | {MANIFEST: msgspec.json.format(msgspec.json.encode(manifest), indent=2)})
    return manifest


def read(folder: Path) -> Bundle:
    """Read and verify a bundle; raises BundleError when its format, a file or a hash is not as the manifest says."""
    manifest = _read_manifest(folder)
    for graph in manifest.roles.values():
        _verify(folder / graph.file, graph.sha256)
    _verify(folder / manifest.golden.file, manifest.golden.sha256)
    return Bundle(folder, manifest)


class _Version(Struct):
    """The one field that every format has."""

    format: int


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        inside = sorted(str(found.parent) for found in folder.glob(f"*/{MANIFEST}"))
        raise BundleError(
            f"{folder} is not a bundle: {MANIFEST}: {error.strerror}",
            f"did you mean {' or '.join(inside[:_NAMED])}?" if inside else "name a folder that edge-node export wrote",
        ) from error
    try:
        found = msgspec.json.decode(content, type=_Version).format
        if found != FORMAT:
            raise BundleError(
                f"{path} has format {found}; this edge-node reads format {FORMAT}",
                "upgrade edge-node" if found > FORMAT else "export the model again",
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(f"{path} is damaged: {error}", "export the model again") from error
    if CLASSIFIER not in manifest.roles or len(manifest.golden.probabilities) != len(manifest.classes):
        raise BundleError(
            f"{path} contradicts itself: no {CLASSIFIER}, or not one golden probability for each class",
            "export the model again",
        )
    return manifest


def _verify(path: Path, sha256: str) -> None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"the bundle lacks {path}: {error.strerror}", "copy the whole bundle folder again") from error
    if digest != sha256:
        raise BundleError(
            f"{path} is not the file that was exported: its hash differs from {MANIFEST}",
            "copy the whole bundle folder again, or export the model again",
        )


def _replace(folder: Path, files: dict[str, bytes]) -> None:
    """Put a folder with these files at `folder`; one that was there is gone afterwards, or untouched on an error."""
    folder = folder.resolve()
    fresh, old = (folder.with_name(f".{folder.name}.{uuid.uuid4().hex}") for _ in range(2))
    fresh.mkdir(parents=True)
    try:
        for name, content in files.items():
            with (fresh / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # the old bundle goes next: the new one must survive a power cut
        if folder.exists():
            folder.replace(old)
        fresh.replace(folder)
    except OSError:
        if old.exists() and not folder.exists():
            old.replace(folder)
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
