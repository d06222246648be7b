"""The model in onnxruntime, without any code of ours: the baseline."""

from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edge.bundle import bundle_format


class Bare:
    """A session as the handbook makes one, with a number of threads."""

    def __init__(self, folder: Path, threads: int) -> None:
        manifest = bundle_format.read_bundle(folder).manifest
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        path = folder / manifest.roles[bundle_format.CLASSIFIER].file
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self._input, self._output = manifest.input.name, manifest.output
        self.size = manifest.input.size

    def run(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """uint8 [N, size, size, 3] -> float32 [N, classes]."""
        found: NDArray[np.float32] = self._session.run([self._output], {self._input: images})[0]
        return found
