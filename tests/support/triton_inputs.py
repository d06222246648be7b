"""Inputs for tritonclient: images as a tensor or as files."""

import numpy as np
import tritonclient.http as triton
from numpy.typing import NDArray


def tensor(images: NDArray[np.uint8], *, binary: bool = True) -> triton.InferInput:
    found = triton.InferInput("image", list(images.shape), "UINT8")
    found.set_data_from_numpy(images, binary_data=binary)
    return found


def files(*contents: bytes) -> triton.InferInput:
    found = triton.InferInput("image", [len(contents)], "BYTES")
    found.set_data_from_numpy(np.array(contents, np.object_))
    return found
