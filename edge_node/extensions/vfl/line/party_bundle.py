"""Bundle of a sensor or head, a folder: graphs by their roles,
`manifest.json`, `golden.safetensors`.

A sensor's has the role `sensor`; the head's has `head` and, where an agent decides local
iterations, `policy`. Files, hashes and signatures are as in `edge.bundle.bundle_format`.
"""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from safetensors.numpy import save

from broker_config.protocol.messages import ClassName, Name, RunId
from edge.bundle.bundle_format import (
    FORMAT,
    MANIFEST,
    BundleError,
    Graph,
    Signing,
    check_files,
    check_format,
    load_manifest,
    next_version,
    write_files,
)
from edge.bundle.verification import Verifier
from edge_node.extensions.vfl.messages import Channel, Period, Privacy

SENSOR: Literal["sensor"] = "sensor"
HEAD: Literal["head"] = "head"
GOLDEN = "golden.safetensors"
TOLERANCE = 1e-4  # of golden values, relative to the largest of them or to 1
_EXPORT = "let the training process write it again"

Array = NDArray[np.float32]


class EmbeddingSource(Struct, frozen=True, kw_only=True):
    """A sensor, and how many numbers its embeddings have."""

    name: Name
    size: Annotated[int, Meta(ge=1, le=1 << 16)]


class Golden(Graph, frozen=True, kw_only=True):
    """Values of all inputs and what the graph must give for them, within `tolerance`:
    arrays by their names.
    """

    tolerance: Annotated[float, Meta(gt=0, le=0.1)] = TOLERANCE


class Description(Struct, frozen=True, kw_only=True):
    """An exporter's description of a member's model."""

    federation: Name
    run: RunId
    node: Name  # whose it is: a sensor's, or the coordinator's
    role: Literal["sensor", "head"]
    model: str  # of the sensors (edge_node.extensions.vfl.networks)
    round: Period
    # of a sensor's bundle: itself
    sensors: Annotated[tuple[EmbeddingSource, ...], Meta(min_length=1, max_length=64)]
    classes: Annotated[tuple[ClassName, ...], Meta(min_length=2, max_length=1000)]
    reading: Literal["class", "expectation"] = "class"
    columns: tuple[str, ...] = ()  # of a sensor's rows, in the order of its samples
    product: str = "product"  # name of the column with products' ids
    unit: str | None = None  # and of that which says which rows follow one another
    cycles: Annotated[int, Meta(ge=1, le=10_000)] = 1
    channel: Channel = Channel()  # that is simulated on the way to the head
    privacy: Privacy = Privacy()
    # range of each number of its embeddings in that round, which the channel goes by
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    deviation: float = 0.0  # of all of them
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # of the simulated channel
    precision: Literal["fp32"] = "fp32"


class Manifest(Description, frozen=True, kw_only=True):
    """`manifest.json`: the description, and the files by their hashes.

    Fields may be added with a default.
    """

    format: int = FORMAT
    software: str
    created: str  # ISO 8601, UTC
    roles: dict[str, Graph]
    golden: Golden
    version: Annotated[int, Meta(ge=0)] = 0  # of signed bundles: grows with each export
    expires: Annotated[datetime, Meta(tz=True)] | None = None


class Bundle(NamedTuple):
    """A bundle on disk, whose files are those of its manifest."""

    folder: Path
    manifest: Manifest


def write_bundle(
    folder: Path,
    description: Description,
    graphs: Mapping[str, bytes],
    golden: Mapping[str, Array | NDArray[np.bool_]],
    signing: Signing | None = None,
) -> Manifest:
    """Write a bundle with these graphs by role, in one step as others see it;
    one that is there is replaced.

    `golden` holds inputs and outputs of the graph of the description's role. UsageError when
    `folder` is no bundle.
    """
    files = {f"{role}.onnx": graph for role, graph in graphs.items()}
    files[GOLDEN] = save({name: np.ascontiguousarray(value) for name, value in golden.items()})
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    version_or_zero = next_version(folder) if signing else 0
    expires = signing.expires if signing else None
    manifest = Manifest(
        **{name: getattr(description, name) for name in Description.__struct_fields__},
        software=version("edge-node"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        roles={role: Graph(file=f"{role}.onnx", sha256=digests[f"{role}.onnx"]) for role in graphs},
        golden=Golden(file=GOLDEN, sha256=digests[GOLDEN]),
        version=version_or_zero,
        expires=expires,
    )
    write_files(folder, files, manifest, signing)
    return manifest


def read_bundle(folder: Path, verifier: Verifier | None = None) -> Bundle:
    """A bundle whose files are those of its manifest, which `verifier` has verified;
    BundleError if it is none.
    """
    if verifier is None:
        manifest = parse_manifest(folder, load_manifest(folder))
        return _complete(folder, manifest)
    with verifier.admit_manifest(folder, parse_manifest) as found:
        return _complete(folder, found.manifest)


def read_unverified(folder: Path) -> Manifest:
    """The manifest of a bundle, unverified. BundleError if it is none."""
    return parse_manifest(folder, load_manifest(folder))


def _complete(folder: Path, manifest: Manifest) -> Bundle:
    check_files(folder, [*manifest.roles.values(), manifest.golden])
    return Bundle(folder, manifest)


def parse_manifest(folder: Path, content: bytes) -> Manifest:
    """The manifest whose bytes are `content`; BundleError if it is none of a sensor or head."""
    path = folder / MANIFEST
    try:
        if not check_format(path, content):
            raise BundleError(
                f"{path} is not a bundle of a sensor or head", "serve it with edge-node serve"
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} is damaged: {error}", _EXPORT) from error
    if manifest.role not in manifest.roles:
        raise BundleError(
            f"{path} contradicts itself: no graph of the role {manifest.role}", _EXPORT
        )
    return manifest
