"""The deployable model, a folder: `model.onnx`, `manifest.json`, `golden.png`. The reader owns the format.

A signed one has two files more: `manifest.sig`, its node's signature under manifest.json, and `charter`, which says
whose key that is. `verify` checks both.
"""

import hashlib
import io
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from PIL import Image

from broker_config.protocol import messages
from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Digest, Name, Round
from broker_config.storage.disk import writing

if TYPE_CHECKING:
    from broker_config.security.signing import SigningKey

FORMAT = 1
MANIFEST, SIGNATURE, CHARTER = "manifest.json", "manifest.sig", "charter"
CLASSIFIER = "classifier"
CONTEXT = "bundle"  # of the signature
TOLERANCE = 1e-3  # of golden probabilities, in fp32
LARGEST = {MANIFEST: 1 << 20, SIGNATURE: 64, CHARTER: 1 << 24}  # bytes
_LARGEST = 1 << 30  # bytes of any other file
_NAMED = 5  # folders that an error proposes
_COPY_AGAIN = "copy the whole bundle folder again"

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
    tolerance: Annotated[float, Meta(gt=0, le=0.1)] = TOLERANCE


class Confidence(Struct, frozen=True, kw_only=True):
    """What held-out images of the node say about how sure the model may be."""

    images: int  # that it was measured on
    temperature: float = 1.0  # by which the graph divides its logits
    coverage: float = 1.0  # share of them whose confidence reaches the threshold of its class
    accuracy: float = 0.0  # of those
    thresholds: dict[str, float] = {}  # least confidence of each class


class Reference(Struct, frozen=True, kw_only=True):
    """How the model saw held-out images: a safetensors file that drift and novelty are measured against."""

    file: FileName
    sha256: Digest


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
    extras: tuple[
        Literal["opinions", "features", "maps"], ...
    ] = ()  # other outputs; edge.inference.predictor.Outputs has shapes
    encoders: tuple[Literal["received", "own"], ...] = ()  # in the order in which opinions and maps have them
    precision: Literal["fp32", "int8"] = "fp32"
    confidence: Confidence | None = None
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
    reference: Reference | None = None
    # Of signed bundles alone:
    broadcast: messages.Manifest | None = None  # that the model was made from, as its coordinator has signed it
    version: Annotated[int, Meta(ge=0)] = 0  # grows with each export of a node: seconds since 1970, or more
    expires: Annotated[datetime, Meta(tz=True)] | None = None  # nobody should start to serve it afterwards

    @property
    def id(self) -> str:
        """Short name of this model in verdicts: whose it is, and of which round."""
        return f"{self.node}@{self.round}"


Part = Graph | Golden | Reference


class Bundle(NamedTuple):
    """A bundle on disk, whose files are those of its manifest."""

    folder: Path
    manifest: Manifest
    digest: str  # SHA-256 of the manifest's bytes, hexadecimal: one name for all that the bundle is


class Signing(NamedTuple):
    """What makes a bundle a signed one."""

    key: "SigningKey"  # the node's
    charter: bytes  # sealed
    broadcast: messages.Manifest | None  # that the model was made from; None of a line's sensor or head
    expires: datetime


def write(
    folder: Path,
    description: Description,
    onnx: bytes,
    golden: NDArray[np.uint8],
    probabilities: Sequence[float],
    signing: Signing | None = None,
    reference: bytes | None = None,
    tolerance: float = TOLERANCE,
) -> Manifest:
    """Write a bundle, in one step as others see it; a bundle that is there already is replaced.

    `golden` is uint8 [size, size, 3]; `probabilities` is what `onnx` gives for it, one for each class, within
    `tolerance`. `reference` is what `Reference.encode` gives. Raises UsageError when `folder`
    exists and is no bundle.
    """
    size, classes = description.input.size, description.classes
    if golden.shape != (size, size, 3) or golden.dtype != np.uint8 or len(probabilities) != len(classes):
        raise ValueError(f"expected a golden image uint8 [{size}, {size}, 3] and {len(classes)} probabilities")
    png = io.BytesIO()
    Image.fromarray(golden).save(png, "PNG")
    files = {"model.onnx": onnx, "golden.png": png.getvalue()}
    if reference is not None:
        files["reference.safetensors"] = reference
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = Manifest(
        **{name: getattr(description, name) for name in Description.__struct_fields__},
        software=version("edge-node"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        roles={CLASSIFIER: Graph(file="model.onnx", sha256=digests["model.onnx"])},
        golden=Golden(
            file="golden.png",
            sha256=digests["golden.png"],
            probabilities=tuple(float(p) for p in probabilities),
            tolerance=tolerance,
        ),
        reference=Reference(file="reference.safetensors", sha256=digests["reference.safetensors"])
        if reference is not None
        else None,
        broadcast=signing.broadcast if signing else None,
        version=next_version(folder) if signing else 0,
        expires=signing.expires if signing else None,
    )
    put(folder, files, manifest, signing)
    return manifest


def put(folder: Path, files: dict[str, bytes], manifest: Struct, signing: Signing | None) -> None:
    """Let `folder` hold these files, their manifest and, if it is to be signed, what proves who has made it.

    UsageError when `folder` exists and is no bundle.
    """
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise UsageError(f"{folder} exists and is not a bundle", "name a folder that does not exist yet")
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    proof = {SIGNATURE: signing.key.sign(CONTEXT, content), CHARTER: signing.charter} if signing else {}
    with writing(folder):
        _replace(folder, {**files, MANIFEST: content, **proof})


def next_version(folder: Path) -> int:
    """The clock, unless it has gone back since the bundle that is there was written."""
    there = 0
    with suppress(BundleError, msgspec.DecodeError, UnicodeDecodeError):  # none, or damaged: writing another one cures
        there = msgspec.json.decode(load_manifest(folder), type=_Beginning).version
    return max(int(time.time()), there + 1)


def read(folder: Path) -> Bundle:
    """Read a bundle; raises BundleError when its format, a file or a hash is not as the manifest says."""
    content = load_manifest(folder)
    return complete(folder, parse(folder, content), content)


def complete(folder: Path, manifest: Manifest, content: bytes) -> Bundle:
    """Return the bundle when its files are those of the manifest, by their hashes; else BundleError."""
    check_files(folder, parts(manifest))
    return Bundle(folder, manifest, hashlib.sha256(content).hexdigest())


def parts(manifest: Manifest) -> list[Part]:
    """The files that a manifest lists by their hashes."""
    return [*manifest.roles.values(), manifest.golden, *([manifest.reference] if manifest.reference else [])]


def files(manifest: Manifest) -> set[str]:
    """Names of the files that a bundle may have."""
    return {*LARGEST, *(part.file for part in parts(manifest))}


def unlisted(folder: Path, manifest: Manifest) -> list[str]:
    """Names in the folder that are not of the bundle; nothing reads such a file."""
    return sorted({each.name for each in folder.iterdir()} - files(manifest))


def load(folder: Path, name: str) -> bytes:
    """Return the content of a small file, of at most LARGEST[name] bytes; BundleError if it is missing or larger."""
    with _opened(folder / name, LARGEST[name]) as file:
        return file.read(LARGEST[name])


def load_manifest(folder: Path) -> bytes:
    """Return the content of the manifest; BundleError when `folder` is no bundle."""
    if (folder / MANIFEST).exists():
        return load(folder, MANIFEST)
    inside = sorted(str(found.parent) for found in folder.glob(f"*/{MANIFEST}"))
    raise BundleError(
        f"{folder} is not a bundle: {MANIFEST} is missing",
        f"did you mean {' or '.join(inside[:_NAMED])}?" if inside else "name a folder that edge-node export wrote",
    )


class _Beginning(Struct):
    """What every format has."""

    format: int
    version: int = 0
    role: str = ""  # of the bundle of a line's member


def check_format(path: Path, content: bytes) -> str:
    """A bundle's role, if it says one; BundleError if it is of another format, msgspec.DecodeError if it is none."""
    found = msgspec.json.decode(content, type=_Beginning)
    if found.format != FORMAT:
        raise BundleError(
            f"{path} has format {found.format}; this edge-node reads format {FORMAT}",
            "upgrade edge-node" if found.format > FORMAT else "export the model again",
        )
    return found.role


def parse(folder: Path, content: bytes) -> Manifest:
    """Return the manifest whose bytes are `content`; BundleError if it is none that can be served."""
    path = folder / MANIFEST
    try:
        if role := check_format(path, content):
            raise BundleError(f"{path} is of a line's {role}", "serve it with edge-node vfl serve")
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} is damaged: {error}", "export the model again") from error
    if CLASSIFIER not in manifest.roles or len(manifest.golden.probabilities) != len(manifest.classes):
        raise BundleError(
            f"{path} contradicts itself: no {CLASSIFIER}, or not one golden probability for each class",
            "export the model again",
        )
    return manifest


def check_files(folder: Path, parts: Sequence[Part]) -> None:
    """BundleError unless the files of a bundle are those of its manifest, by their hashes."""
    for part in parts:
        with _opened(folder / part.file, _LARGEST) as file:
            _check_digest(folder / part.file, hashlib.file_digest(file, "sha256").hexdigest(), part.sha256)


@contextmanager
def copied(folder: Path, part: Part) -> Iterator[Path]:
    """A file of the bundle in memory, where nobody changes it any more; BundleError unless it is the manifest's."""
    path = folder / part.file
    with _opened(path, _LARGEST) as file, os.fdopen(os.memfd_create(part.file), "w+b") as copy:
        shutil.copyfileobj(file, copy)
        copy.seek(0)
        _check_digest(path, hashlib.file_digest(copy, "sha256").hexdigest(), part.sha256)
        yield Path(f"/proc/self/fd/{copy.fileno()}")


def _check_digest(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise BundleError(
            f"{path} is not the file that was exported: its hash differs from {MANIFEST}",
            f"{_COPY_AGAIN}, or export the model again",
        )


@contextmanager
def _opened(path: Path, largest: int) -> Iterator[io.BufferedReader]:
    """A plain file of at most so many bytes, to be read; else BundleError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would make us wait
    except OSError as error:
        raise BundleError(f"the bundle lacks {path}: {error.strerror}", _COPY_AGAIN) from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > largest:
            raise BundleError(f"{path} is not a plain file of at most {largest} bytes", _COPY_AGAIN)
        yield file


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
