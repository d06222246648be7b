"""The model behind LitServe: `python -m benchmarks.serving.litserve_service BUNDLE THREADS
PORT`.
"""

import base64
import io
import sys
from pathlib import Path
from typing import Any

import litserve
import numpy as np
from fastapi import Request
from numpy.typing import NDArray
from PIL import Image

from benchmarks.serving.onnxruntime_baseline import Bare


class Api(litserve.LitAPI):  # type: ignore[misc]
    """POST /predict takes JSON with a picture's raw bytes or an image file, as Base64:
    LitServe takes JSON.
    """

    def __init__(self, bundle: Path, threads: int) -> None:
        super().__init__()
        self._bundle, self._threads = bundle, threads

    def setup(self, device: str) -> None:  # noqa: ARG002
        """Load the model, in LitServe's own worker process."""
        self._model = Bare(self._bundle, self._threads)

    def decode_request(self, request: Request) -> NDArray[np.uint8]:
        """JSON -> uint8 [size, size, 3]."""
        # LitServe takes the annotation as a sign to decode the body
        assert isinstance(request, dict)
        size = self._model.size
        if "tensor" in request:
            return np.frombuffer(base64.b64decode(request["tensor"]), np.uint8).reshape(
                size, size, 3
            )
        image = Image.open(io.BytesIO(base64.b64decode(request["image"])))
        return np.array(image.resize((size, size), Image.Resampling.BILINEAR).convert("RGB"))

    def predict(self, pixels: NDArray[np.uint8]) -> list[float]:
        """Uint8 [size, size, 3] -> a probability for each class."""
        found: list[float] = self._model.run(pixels[None])[0].tolist()
        return found

    def encode_response(self, probabilities: list[float]) -> dict[str, Any]:
        """The answer's JSON."""
        return {"probabilities": probabilities}


if __name__ == "__main__":
    folder, count, port = sys.argv[1:]
    server = litserve.LitServer(
        Api(Path(folder), int(count)), accelerator="cpu", workers_per_device=1
    )
    server.run(
        port=int(port),
        log_level="warning",
        generate_client_file=False,
        num_api_servers=1,
        timeout_keep_alive=300,
    )
