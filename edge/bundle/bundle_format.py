"""Format of a bundle, the deployable model: a folder with `model.onnx`,
`manifest.json` and `golden.png`.

A signed bundle has two more files: `manifest.sig`, its node's signature of manifest.json, and
`charter`, which says whose key that is; `verification` checks both.
"""

import hashlib
import io
import os
import shlex
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
from edge.bundle.comparison import Comparison

if TYPE_CHECKING:
    from broker_config.security.signing import SigningKey

FORMAT = 1
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
CHARTER = "charter"
PERSONAL_MODEL = "personal.json"  # what a model that is not exported yet has instead of a manifest
CLASSIFIER = "classifier"
CONTEXT = "bundle"  # of the signature
# metric of a detector made of good images alone: the share of these that it rejects
FALSE_REJECTS = "false_rejects"
TOLERANCE = 1e-3  # of golden probabilities, for fp32
LARGEST = {MANIFEST: 1 << 20, SIGNATURE: 64, CHARTER: 1 << 24}  # bytes
_LARGEST = 1 << 30  # bytes of any other file
_BLOCK = 1 << 20  # bytes of a file that are copied at once
_PROPOSED = 5  # folders that an error proposes
_COPY_AGAIN = "copy the whole bundle folder again"

FileName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z", description="plain: no folders")
]


class BundleError(UsageError):
    """A bundle that cannot be served: which file is at fault, and what to do."""


class Input(Struct, frozen=True, kw_only=True):
    """Input of the graph: uint8 RGB images [N, size, size, 3];
    scaling and normalising are inside the graph.
    """

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


class HeldOut(Struct, frozen=True, kw_only=True):
    """Outputs for held-out images, cross-fitted:
    temperature and thresholds of each come from the others.

    They tell a line what errors its own threshold brings. As private as the model.
    """

    labels: bytes  # uint16 [n], little-endian as all of it: positions in `classes`
    probabilities: bytes  # float16 [n, classes], of the graph
    # uint8 [n]: 1 if the verdict under a line's default prior reaches its class's threshold, else 0
    accepted: bytes

    @staticmethod
    def of(
        labels: NDArray[np.int64], probabilities: NDArray[np.floating], accepted: NDArray[np.bool_]
    ) -> "HeldOut":
        """From labels [n], probabilities [n, classes] and whether each verdict is accepted [n]."""
        return HeldOut(
            labels=labels.astype("<u2").tobytes(),
            probabilities=probabilities.astype("<f2").tobytes(),
            accepted=accepted.astype("u1").tobytes(),
        )

    def arrays(
        self, classes: int
    ) -> tuple[NDArray[np.uint16], NDArray[np.float32], NDArray[np.bool_]]:
        """Labels [n], probabilities [n, classes] and whether each is accepted [n];
        ValueError if they do not fit.
        """
        labels = np.frombuffer(self.labels, "<u2")
        accepted = np.frombuffer(self.accepted, "u1") > 0
        probabilities = (
            np.frombuffer(self.probabilities, "<f2").astype(np.float32).reshape(-1, classes)
        )
        if not len(labels) == len(accepted) == len(probabilities) > 0 or labels.max() >= classes:
            raise ValueError("not a label, a decision and one probability a class for each image")
        return labels, probabilities, accepted


class Confidence(Struct, frozen=True, kw_only=True):
    """The calibration of a model's confidence, measured on images it has not seen."""

    images: int  # on which it was measured
    groups: int = 0  # of look-alikes among them; 0: unknown, as in bundles of older versions
    # whether each was left out of the model that judged it, which then had fewer images than the
    # one that is served; and the part of its errors that this one is expected to make
    left_out: bool = False
    credit: Annotated[float, Meta(ge=0, le=1)] = 1.0
    temperature: float = 1.0  # by which the graph divides its logits
    # share of them that reach the threshold of their class, under a line's default prior
    coverage: float = 1.0
    accuracy: float = 0.0  # of the model on that share, likewise
    thresholds: dict[str, float] = {}  # least confidence of each class
    held_out: HeldOut | None = None  # of these images, or of some if they are many


class Reference(Struct, frozen=True, kw_only=True):
    """Statistics of held-out images: a safetensors file against which drift and novelty are
    measured.
    """

    file: FileName
    sha256: Digest


class PrivacySpent(Struct, frozen=True, kw_only=True):
    """Differential privacy of each training image:
    what all that left the plant may tell of it, at most.

    It says nothing of the model or bundle itself, which knows the plant's images as they are.
    """

    epsilon: float  # all runs of the node's state folder together
    delta: float
    settings: messages.ImagePrivacy  # of the run


class Provenance(Struct, frozen=True, kw_only=True):
    """How a model came about, for its card. It tells counts of images, and names none."""

    rounds: Round  # of the run
    options: dict[str, messages.Option]  # of the method
    training: messages.Training
    preprocessing: messages.Preprocessing
    head: messages.Head
    seed: int
    nodes: int = 0  # that the run expected; 0: unknown
    quorum: int = 0  # contributions that closed a round, at least; likewise
    aggregation: messages.Aggregation | None = None  # likewise
    # images of each class that were not trained on: named rightly, all
    tested: dict[str, tuple[int, int]] = {}
    software: dict[str, str]  # versions with which it was trained
    record: messages.RecordHead | None = None  # of the coordinator, at the end of the run
    privacy: PrivacySpent | None = None  # None if the federation was not private


class Description(Struct, frozen=True, kw_only=True):
    """Description of a model by its exporter: where it comes from, its input and its outputs."""

    federation: str
    run: str
    node: Name
    method: str
    model: str
    round: Round
    refits: Annotated[int, Meta(ge=0)] = 0  # how often it was made anew since that round
    classes: Annotated[tuple[messages.ClassName, ...], Meta(min_length=2)]
    # training images of each of the node's own classes; or unknown
    trained: dict[str, Annotated[int, Meta(ge=1)]] = {}
    # the images that trained it, by `short_digest`, 10,000 at most; or unknown
    trained_on: tuple[str, ...] = ()
    input: Input
    output: str = "probabilities"  # float32 [N, classes]
    extras: tuple[
        Literal["opinions", "features", "maps"], ...
    ] = ()  # other outputs; their shapes: edge.inference.predictor.Outputs
    # in the order of opinions and maps
    encoders: tuple[Literal["received", "own", "alone"], ...] = ()
    precision: Literal["fp32", "int8"] = "fp32"
    confidence: Confidence | None = None
    metrics: dict[str, float] = {}
    comparison: Comparison | None = None  # with training alone
    # None if it was not trained in a federation, or exported by an older version
    provenance: Provenance | None = None


def short_digest(digest: str) -> str:
    """What a manifest keeps of an image's SHA-256, hexadecimal:
    enough to tell whether it is the same file.
    """
    return digest[:16]


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
    # Of signed bundles only:
    # from which the model was made, as signed by its coordinator
    broadcast: messages.Manifest | None = None
    # grows with each export of a node: seconds since 1970, or more
    version: Annotated[int, Meta(ge=0)] = 0
    # it must not be put into service afterwards
    expires: Annotated[datetime, Meta(tz=True)] | None = None

    @property
    def id(self) -> str:
        """Short name of this model in verdicts: its node, round and refits."""
        refits = f"+{self.refits}" if self.refits else ""
        return f"{self.node}@{self.round}{refits}"


Part = Graph | Golden | Reference


class Bundle(NamedTuple):
    """A bundle on disk whose files match its manifest."""

    folder: Path
    manifest: Manifest
    digest: str  # SHA-256 of the manifest's bytes, hexadecimal; identifies the whole bundle


class Signing(NamedTuple):
    """What signs a bundle."""

    key: "SigningKey"  # the node's
    charter: bytes  # the signed member list
    # from which the model was made; None where a model is made from none
    broadcast: messages.Manifest | None
    expires: datetime


def write_bundle(
    folder: Path,
    description: Description,
    onnx: bytes,
    golden: NDArray[np.uint8],
    probabilities: Sequence[float],
    signing: Signing | None = None,
    reference: bytes | None = None,
    tolerance: float = TOLERANCE,
) -> Manifest:
    """Write a bundle atomically; an existing bundle is replaced.

    `golden` is uint8 [size, size, 3]; `probabilities` are those that `onnx` gives for it, one for
    each class, within `tolerance`. `reference` is the result of `Reference.encode`. Raises
    UsageError when `folder` exists and is no bundle.
    """
    size = description.input.size
    classes = description.classes
    if (
        golden.shape != (size, size, 3)
        or golden.dtype != np.uint8
        or len(probabilities) != len(classes)
    ):
        raise ValueError(
            f"expected a golden image uint8 [{size}, {size}, 3] and {len(classes)} probabilities"
        )
    png = io.BytesIO()
    Image.fromarray(golden).save(png, "PNG")
    files = {"model.onnx": onnx, "golden.png": png.getvalue()}
    if reference is not None:
        files["reference.safetensors"] = reference
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    reference_or_none = (
        Reference(file="reference.safetensors", sha256=digests["reference.safetensors"])
        if reference is not None
        else None
    )
    broadcast = signing.broadcast if signing else None
    version_or_zero = next_version(folder) if signing else 0
    expires = signing.expires if signing else None
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
        reference=reference_or_none,
        broadcast=broadcast,
        version=version_or_zero,
        expires=expires,
    )
    write_files(folder, files, manifest, signing)
    return manifest


def write_files(
    folder: Path, files: dict[str, bytes], manifest: Struct, signing: Signing | None
) -> None:
    """Write a folder with these files, their manifest and, with `signing`,
    its signature and charter.

    UsageError when `folder` exists and is no bundle.
    """
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise UsageError(
            f"{folder} exists and is not a bundle", "name a folder that does not exist yet"
        )
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    proof = (
        {SIGNATURE: signing.key.sign(CONTEXT, content), CHARTER: signing.charter} if signing else {}
    )
    with writing(folder):
        _replace(folder, {**files, MANIFEST: content, **proof})


def next_version(folder: Path) -> int:
    """The current time, or one more than the version of the existing bundle if the clock was set
    back since.
    """
    existing = 0
    # none, or a damaged one to be replaced
    with suppress(BundleError, msgspec.DecodeError, UnicodeDecodeError):
        existing = msgspec.json.decode(load_manifest(folder), type=_Header).version
    return max(int(time.time()), existing + 1)


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle; raises BundleError when its format,
    a file or a hash does not match the manifest.
    """
    content = load_manifest(folder)
    return check_bundle(folder, parse_manifest(folder, content), content)


def check_bundle(folder: Path, manifest: Manifest, content: bytes) -> Bundle:
    """The bundle, once the hashes of its files match the manifest; else BundleError."""
    check_files(folder, parts(manifest))
    return Bundle(folder, manifest, _digest(content))


def read_digest(folder: Path) -> str:
    """The digest of the bundle in a folder, of which nothing is parsed or checked;
    BundleError when there is none.
    """
    return _digest(load_manifest(folder))


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()


def parts(manifest: Manifest) -> list[Part]:
    """The files that a manifest lists with their hashes."""
    reference = [manifest.reference] if manifest.reference else []
    return [*manifest.roles.values(), manifest.golden, *reference]


def file_names(manifest: Manifest) -> set[str]:
    """Names of the files that a bundle may have."""
    return {*LARGEST, *(part.file for part in parts(manifest))}


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    """Names in the folder that do not belong to the bundle; nothing reads such a file."""
    return sorted({each.name for each in folder.iterdir()} - file_names(manifest))


def read_small_file(folder: Path, name: str) -> bytes:
    """The content of a small file, of at most LARGEST[name] bytes;
    BundleError if it is missing or larger.
    """
    with _open_plain(folder / name, LARGEST[name]) as file:
        return file.read(LARGEST[name])


def read_file(folder: Path, name: str) -> bytes:
    """The content of any of a bundle's files; BundleError as `copy_file`."""
    return b"".join(_blocks(folder, name))


def copy_file(folder: Path, name: str, target: Path) -> None:
    """Copy one of a bundle's files into another folder.

    BundleError if it is missing, a device, larger than it may be, or no part of the bundle.
    """
    with (target / name).open("wb") as copy:
        for block in _blocks(folder, name):
            copy.write(block)


def _blocks(folder: Path, name: str) -> Iterator[bytes]:
    path = folder / name
    # No hash tells what these two must be: a link may lead to a secret.
    is_unlisted = name in (SIGNATURE, CHARTER)
    if is_unlisted and not path.resolve().is_relative_to(folder.resolve()):
        raise BundleError(f"{path} leads to a file outside of the bundle", _COPY_AGAIN)
    left = LARGEST.get(name, _LARGEST)
    with _open_plain(path, left) as file:
        while block := file.read(min(left, _BLOCK)):
            left -= len(block)
            yield block


def load_manifest(folder: Path) -> bytes:
    """The content of the manifest; BundleError when `folder` is no bundle."""
    if (folder / MANIFEST).exists():
        return read_small_file(folder, MANIFEST)
    around = folder if folder.exists() else folder.parent
    inside = sorted(str(found.parent) for found in around.glob(f"*/{MANIFEST}"))
    models = [each for each in (folder, folder / "model") if (each / PERSONAL_MODEL).exists()]
    if inside:
        remedy = f"did you mean {' or '.join(inside[:_PROPOSED])}?"
    elif models:
        remedy = (
            f"it is a model: edge-node export {shlex.quote(str(models[0]))} --out bundles makes "
            "a bundle of it"
        )
    else:
        remedy = (
            "name a folder that edge-node export wrote, or the bundle folder in a --state, which "
            "is there once some rounds are played"
        )
    raise BundleError(f"{folder} is not a bundle: {MANIFEST} is missing", remedy)


class _Header(Struct):
    """The fields that every format has."""

    format: int
    version: int = 0
    role: str = ""  # of a bundle that another command than `serve` serves


def check_format(path: Path, content: bytes) -> str:
    """A bundle's role, if it names one; BundleError for another format,
    msgspec.DecodeError if it is no manifest.
    """
    found = msgspec.json.decode(content, type=_Header)
    if found.format != FORMAT:
        remedy = "upgrade edge-node" if found.format > FORMAT else "export the model again"
        raise BundleError(
            f"{path} has format {found.format}; this edge-node reads format {FORMAT}", remedy
        )
    return found.role


def parse_manifest(folder: Path, content: bytes) -> Manifest:
    """Parse a manifest; BundleError if it is none that can be served."""
    path = folder / MANIFEST
    try:
        if role := check_format(path, content):
            raise BundleError(
                f"{path} is the bundle of a {role}",
                "serve it with the serve command of the federation that has made it; edge-node "
                "--help lists what is installed",
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} is damaged: {error}", "export the model again") from error
    if CLASSIFIER not in manifest.roles or len(manifest.golden.probabilities) != len(
        manifest.classes
    ):
        raise BundleError(
            f"{path} contradicts itself: no {CLASSIFIER}, or not one golden probability for each "
            "class",
            "export the model again",
        )
    if manifest.confidence and manifest.confidence.held_out:
        try:
            manifest.confidence.held_out.arrays(len(manifest.classes))
        except ValueError as error:
            raise BundleError(
                f"{path} contradicts itself: its held-out images do not fit ({error})",
                "export the model again",
            ) from error
    if unknown := sorted(manifest.trained.keys() - set(manifest.classes)):
        raise BundleError(
            f"{path} contradicts itself: it was trained on {unknown[0]!r}, which is none of its "
            "classes",
            "export the model again",
        )
    return manifest


def check_files(folder: Path, parts: Sequence[Part]) -> None:
    """BundleError unless the hashes of a bundle's files match its manifest."""
    for part in parts:
        with _open_plain(folder / part.file, _LARGEST) as file:
            _check_digest(
                folder / part.file, hashlib.file_digest(file, "sha256").hexdigest(), part.sha256
            )


@contextmanager
def copied_to_memory(folder: Path, part: Part) -> Iterator[Path]:
    """A copy of a file in memory, where nobody can change it;
    BundleError unless it matches the manifest.
    """
    path = folder / part.file
    with _open_plain(path, _LARGEST) as file, os.fdopen(os.memfd_create(part.file), "w+b") as copy:
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
def _open_plain(path: Path, largest: int) -> Iterator[io.BufferedReader]:
    """A plain file of at most `largest` bytes, open for reading; else BundleError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block us
    except OSError as error:
        raise BundleError(f"the bundle lacks {path}: {error.strerror}", _COPY_AGAIN) from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > largest:
            raise BundleError(f"{path} is not a plain file of at most {largest} bytes", _COPY_AGAIN)
        yield file


def _replace(folder: Path, files: dict[str, bytes]) -> None:
    """Put a folder with these files at `folder`, in place of an existing one,
    which stays untouched on an error.
    """
    folder = folder.resolve()
    fresh, old = (folder.with_name(f".{folder.name}.{uuid.uuid4().hex}") for _ in range(2))
    fresh.mkdir(parents=True)
    try:
        for name, content in files.items():
            with (fresh / name).open("wb") as file:
                file.write(content)
                file.flush()
                # the old bundle goes next: the new one must survive a power cut
                os.fsync(file.fileno())
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
