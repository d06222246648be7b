"""Cost of an image for a texture network at inference:
`python -m benchmarks.texture_serving [--models fedtfi_small]`.

Weights are drawn: times do not hang on them. Calibration images are noise, so nothing is said of
verdicts: the gate of `edge-node export --int8` measures those. All graphs of a model run in turns,
one image at a time, as the line runs them; the tenth percentile is what they take where nothing
else disturbs them.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from benchmarks.serving.onnxruntime_baseline import Bare
from edge.bundle import bundle_format
from edge.inference.pipeline import NullConsumer, Pipeline
from edge.inference.served_model import load_model
from export.graph import Architecture, build_module, fill_values, trace
from export.parity import draw_test_images, open_session
from export.quantisation import TOLERANCE, quantise
from trainer.data.drawn_surfaces import CLASSES
from trainer.federation.server.spec import Request, draft
from trainer.models.fusion import SINGLE
from trainer.models.network import to_tensors

_WARM_UP = 3

Call = Callable[[], Awaitable[object]]


def graphs(model: str, weights: str = "none", size: int = 0) -> dict[str, bytes]:
    """The network, exact and in int8, for images of `size` pixels or the model's own size."""
    spec, start = draft(
        Request(method="fedavg", model=model, weights=weights, size=size),
        federation="benchmark",
        classes=CLASSES,
        nodes=2,
    )
    architecture = Architecture(model, len(CLASSES), SINGLE, spec.preprocessing)
    served = build_module(architecture, to_tensors(start), Path(model))
    exact = fill_values(trace(served, spec.preprocessing.size), served)
    return {"fp32": exact, "int8": quantise(exact, draw_test_images(spec.preprocessing.size, 8))}


def served(folder: Path, model: str, content: bytes, size: int) -> Path:
    """A bundle with this graph."""
    description = bundle_format.Description(
        federation="benchmark",
        run="0" * 16,
        node="plant",
        method="fedavg",
        model=model,
        round=1,
        classes=CLASSES,
        input=bundle_format.Input(size=size),
    )
    golden = draw_test_images(size, 1)
    [probabilities] = open_session(content).run(["probabilities"], {"image": golden})[0].tolist()
    bundle_format.write_bundle(
        folder, description, content, golden[0], probabilities, tolerance=TOLERANCE
    )
    return folder


async def timed(calls: dict[str, Call], runs: int) -> dict[str, list[float]]:
    """Milliseconds of each call, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_WARM_UP + runs):
        for name, call in calls.items():
            start = time.perf_counter()
            await call()
            if turn >= _WARM_UP:
                found[name].append((time.perf_counter() - start) * 1000)
    return found


def measure(model: str, runs: int, threads: int) -> None:
    """Print a JSON line for each precision and way to ask."""
    contents = graphs(model)
    with tempfile.TemporaryDirectory() as place:
        calls: dict[str, Call] = {}
        lines = []
        for precision, content in contents.items():
            size = open_session(content).get_inputs()[0].shape[1]
            folder = served(Path(place) / precision, model, content, size)
            pixels = np.random.default_rng(0).integers(0, 256, (1, size, size, 3), np.uint8)
            bare, pipeline = (
                Bare(folder, threads),
                Pipeline(load_model(folder, threads=threads), NullConsumer()),
            )
            lines.append(pipeline)
            calls[f"{precision}, session.run"] = _asked(bare, pixels)
            calls[f"{precision}, Pipeline.infer"] = _inferred(pipeline, pixels)
        for name, times in asyncio.run(timed(calls, runs)).items():
            p10, p50 = np.quantile(times, (0.1, 0.5)).round(2).tolist()
            size = len(contents[name.partition(",")[0]])
            print(
                json.dumps(
                    {"model": model, "what": name, "bytes": size, "p10 ms": p10, "p50 ms": p50}
                ),
                flush=True,
            )
        for pipeline in lines:
            pipeline.close()


def _asked(bare: Bare, pixels: np.ndarray) -> Call:
    async def ask() -> None:
        bare.run(pixels)

    return ask


def _inferred(pipeline: Pipeline, pixels: np.ndarray) -> Call:
    return lambda: pipeline.infer(pipeline.model, pixels)


def main() -> None:
    """Measure each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="fedtfi_small,fedtfi")
    parser.add_argument(
        "--runs", type=int, default=200, help="of each graph; a tenth of `fedtfi`, the paper's"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for model in options.models.split(","):
        measure(model, options.runs // 10 if model == "fedtfi" else options.runs, options.threads)


if __name__ == "__main__":
    main()
