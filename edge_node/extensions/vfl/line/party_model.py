"""Graphs of sensors and head, ready to run on the CPU. For one thread at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from safetensors.numpy import load

from broker_config.protocol.errors import explain_scarcity
from edge.bundle.bundle_format import BundleError, copied_to_memory
from edge.bundle.verification import Verifier
from edge.inference.predictor import session_options
from edge_node.extensions.vfl.line.party_bundle import (
    HEAD,
    SENSOR,
    Array,
    Bundle,
    Manifest,
    read_bundle,
)

Presence = NDArray[np.bool_]
_EXPORT = "let the training process write it again, with the software that is installed here"


class HeadOutput(NamedTuple):
    """The head's predictions of N products."""

    probabilities: Array  # [N, C]
    expectation: Array | None = None  # [N], where classes are numbers


class _Graph:
    """A bundle's graph of its own role; `self_test` compares it with the golden values."""

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        self.manifest: Manifest = bundle.manifest
        graph = self.manifest.roles[self.manifest.role]
        with copied_to_memory(bundle.folder, graph) as path:
            try:
                self._session = onnxruntime.InferenceSession(
                    path, session_options(threads), providers=["CPUExecutionProvider"]
                )
            # onnxruntime has a dozen exceptions of its own, with no common base
            except Exception as error:
                raise explain_scarcity(error) or BundleError(
                    f"{bundle.folder / graph.file} cannot be loaded: {error}", _EXPORT
                ) from error
        self._self_test(bundle)

    def _self_test(self, bundle: Bundle) -> None:
        golden = self.manifest.golden
        with copied_to_memory(bundle.folder, golden) as path:
            values = load(path.read_bytes())
        names = [each.name for each in self._session.get_outputs()]
        try:
            found = self._session.run(
                names, {each.name: values[each.name] for each in self._session.get_inputs()}
            )
            whole = all(
                _near(each, values[name], golden.tolerance)
                for name, each in zip(names, found, strict=True)
            )
        except Exception as error:  # onnxruntime's own, or a value that is not there
            raise BundleError(f"{bundle.folder} does not compute: {error}", _EXPORT) from error
        if not whole:
            raise BundleError(
                f"{bundle.folder} fails its self-test: its graph does not give the golden values",
                _EXPORT,
            )


def _near(found: Array, expected: Array, tolerance: float) -> bool:
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    return found.shape == expected.shape and bool(
        np.all(np.abs(found - expected) <= tolerance * scale)
    )


class SensorModel(_Graph):
    """Compute the embeddings of samples."""

    def embed(self, samples: Array) -> Array:
        """Raw samples float32 [N, columns, cycles] -> embeddings [N, D]."""
        embedding: Array = self._session.run(["embedding"], {"samples": samples})[0]
        return embedding


class HeadModel(_Graph):
    """Compute predictions from embeddings."""

    def predict(self, embeddings: Sequence[Array], present: Presence) -> HeadOutput:
        """Embeddings [N, D_k] of each sensor as received, and which of them count [N, K];
        the others may be zeros.
        """
        inputs = {f"embedding_{index}": each for index, each in enumerate(embeddings)}
        names = ["probabilities", "expectation"][: 1 + (self.manifest.reading == "expectation")]
        return HeadOutput(*self._session.run(names, {**inputs, "present": present}))


def load_sensor(folder: Path, verifier: Verifier | None = None, threads: int = 1) -> SensorModel:
    """A sensor's model, tested against its golden values;
    BundleError if it must or can not be used.
    """
    return SensorModel(_expect(read_bundle(folder, verifier), SENSOR), threads)


def load_head(folder: Path, verifier: Verifier | None = None, threads: int = 1) -> HeadModel:
    """The head's model, likewise."""
    return HeadModel(_expect(read_bundle(folder, verifier), HEAD), threads)


def _expect(bundle: Bundle, role: str) -> Bundle:
    if bundle.manifest.role != role:
        raise BundleError(
            f"{bundle.folder} is the bundle of a {bundle.manifest.role}, not of a {role}",
            "name the bundle of the other member",
        )
    return bundle
