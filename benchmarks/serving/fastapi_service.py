"""The model behind FastAPI: `python -m benchmarks.serving.fastapi_service BUNDLE THREADS PORT`."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from numpy.typing import NDArray
from PIL import Image

from benchmarks.serving.onnxruntime_baseline import Bare


def application(model: Bare) -> FastAPI:
    """POST /tensor takes a picture's raw bytes, POST /image an image file."""
    app = FastAPI()

    def answer(pixels: NDArray[np.uint8]) -> dict[str, Any]:
        return {"probabilities": model.run(pixels[None])[0].tolist()}

    def judged(data: bytes) -> dict[str, Any]:
        image = Image.open(io.BytesIO(data)).resize(
            (model.size, model.size), Image.Resampling.BILINEAR
        )
        return answer(np.array(image.convert("RGB")))

    @app.post("/tensor")  # type: ignore[untyped-decorator]
    async def tensor(request: Request) -> dict[str, Any]:
        pixels = np.frombuffer(await request.body(), np.uint8).reshape(model.size, model.size, 3)
        found: dict[str, Any] = await run_in_threadpool(answer, pixels)
        return found

    @app.post("/image")  # type: ignore[untyped-decorator]
    async def image(request: Request) -> dict[str, Any]:
        found: dict[str, Any] = await run_in_threadpool(judged, await request.body())
        return found

    return app


if __name__ == "__main__":
    bundle, threads, port = sys.argv[1:]
    app = application(Bare(Path(bundle), int(threads)))
    uvicorn.run(app, port=int(port), access_log=False, log_level="warning", timeout_keep_alive=300)
