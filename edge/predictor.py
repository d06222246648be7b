"""A bundle and image arrays -> predictions."""

import os
from typing import NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edge.bundle import CLASSIFIER, Bundle, BundleError, copied
from edge.images import decode


class Prediction(NamedTuple):
    """What the model says about one image: the likeliest class, its probability, and those of all classes in order."""

    label: str
    confidence: float
    probabilities: tuple[float, ...]


class Predictor:
    """A bundle's classifier, loaded into onnxruntime on the CPU; `threads` 0 takes two, or the cores there are."""

    def __init__(self, bundle: Bundle, threads: int = 0) -> None:
        self.bundle = bundle
        self.manifest = bundle.manifest
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or min(2, os.cpu_count() or 1)
        options.inter_op_num_threads = 1
        graph = self.manifest.roles[CLASSIFIER]
        with copied(bundle.folder, graph) as path:
            try:
                self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            except Exception as error:  # onnxruntime has a dozen exceptions of its own, with no common base
                raise BundleError(
                    f"{bundle.folder / graph.file} cannot be loaded: {error}", "export the model again"
                ) from error

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """uint8 [N, size, size, 3] RGB -> float32 [N, classes]; ValueError for any other shape or type."""
        size = self.manifest.input.size
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (size, size, 3):
            raise ValueError(f"expected uint8 [N, {size}, {size}, 3], got {images.dtype} {list(images.shape)}")
        outputs: list[NDArray[np.float32]] = self._session.run(
            [self.manifest.output], {self.manifest.input.name: images}
        )
        return outputs[0]

    def predict(self, images: NDArray[np.uint8]) -> list[Prediction]:
        """uint8 [N, size, size, 3] RGB -> N predictions; ValueError for any other shape or type."""
        return [self._prediction(row) for row in self.probabilities(images).tolist()]

    def self_test(self) -> None:
        """Raise BundleError unless the golden image gives the manifest's probabilities within its tolerance."""
        golden = self.manifest.golden
        with copied(self.bundle.folder, golden) as path:
            image = decode(path, self.manifest.input.size, golden.file)
        try:
            found = self.probabilities(image[None])
        except Exception as error:  # onnxruntime's own: other names or shapes than the manifest promises
            raise BundleError(f"{self.bundle.folder} does not compute: {error}", "export the model again") from error
        expected = np.array([golden.probabilities], np.float32)
        if found.shape != expected.shape or not np.all(np.abs(found - expected) <= golden.tolerance):
            raise BundleError(
                f"{self.bundle.folder} fails its self-test: {golden.file} gives {found.tolist()}, "
                f"expected {expected.tolist()}",
                "export the model again, or install the onnxruntime version it was exported with",
            )

    def _prediction(self, row: list[float]) -> Prediction:
        confidence = max(row)
        return Prediction(self.manifest.classes[row.index(confidence)], confidence, tuple(row))
