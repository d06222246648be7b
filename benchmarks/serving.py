"""What the daemon adds to a bare onnxruntime call: `python benchmarks/serving.py --bundle DIR [--json]`.

In one run, one image at a time: the bare session, the predictor, decoding alone, the daemon's line without HTTP, and
the daemon as a process over one kept connection; for the golden image at twice its size, as PNG and as JPEG.
"""

import argparse
import asyncio
import contextlib
import http.client
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image as Picture

from edge import bundle
from edge.images import decode
from edge.line import Frame, Line, Model, Nowhere
from edge.predictor import Predictor

WARM_UP = 10
SERVE = """
import sys
from pathlib import Path
from edge.assembly import Site
from edge.daemon import serve
from edge.settings import Settings
serve(Path(sys.argv[1]), Settings(), Site("benchmark", Path(sys.argv[3])), port=0, threads=int(sys.argv[2]))
"""


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(bundle.read(options.bundle), options.requests, options.threads)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:<28}{value:10.3f}")


def measure(model: bundle.Bundle, count: int, threads: int) -> dict[str, float]:
    """Name and unit -> value."""
    size = model.manifest.input.size
    pixels = decode(model.folder / model.manifest.golden.file, size)
    files = {kind: encoded(pixels, kind) for kind in ("PNG", "JPEG")}
    predictor = Predictor(model, threads)
    found = {"session.run p50 ms": median(timed(bare(model, pixels[None], threads), count))}
    found["Predictor p50 ms"] = median(timed(partial(predictor.run, pixels[None]), count))
    for kind, data in files.items():
        found[f"decode {kind} p50 ms"] = median(timed(partial(decode, data, size), count))
        found[f"in process {kind} p50 ms"] = median(asyncio.run(judged(predictor, data, count)))
    with daemon(model.folder, threads) as (port, ready, process):
        found["daemon ready s"] = ready
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for kind, data in files.items():
            times = timed(partial(post, connection, data), count)
            found |= {f"HTTP {kind} p50 ms": median(times), f"HTTP {kind} p99 ms": quantiles(times, n=100)[98]}
            served = found[f"decode {kind} p50 ms"] + found["Predictor p50 ms"]
            found[f"HTTP {kind} adds p50 ms"] = found[f"HTTP {kind} p50 ms"] - served
        connection.close()
        found["daemon peak RSS MB"] = peak_memory(process)
    return found


def bare(model: bundle.Bundle, images: NDArray[np.uint8], threads: int) -> Callable[[], object]:
    """The model without any code of ours."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    path = model.folder / model.manifest.roles[bundle.CLASSIFIER].file
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return partial(session.run, None, {model.manifest.input.name: images})


def encoded(pixels: NDArray[np.uint8], kind: str) -> bytes:
    """A file of twice the model's size, so that decoding resizes as it does on a line."""
    out = io.BytesIO()
    size = 2 * pixels.shape[0]
    Picture.fromarray(pixels).resize((size, size)).save(out, kind)
    return out.getvalue()


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of `count` calls."""
    times = []
    for _ in range(WARM_UP + count):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return times[WARM_UP:]


async def judged(predictor: Predictor, data: bytes, count: int) -> list[float]:
    """Milliseconds of each image through the daemon's line, without HTTP."""
    with contextlib.closing(Line(Model(predictor), Nowhere())) as line:
        times = []
        for _ in range(WARM_UP + count):
            start = time.perf_counter()
            await line.judge(Frame("benchmark", data))
            times.append(1000 * (time.perf_counter() - start))
    return times[WARM_UP:]


@contextlib.contextmanager
def daemon(folder: Path, threads: int) -> Iterator[tuple[int, float, int]]:
    """Start the daemon; its port, the seconds until it was ready, and its process id."""
    start = time.perf_counter()
    command = [sys.executable, "-c", SERVE, str(folder), str(threads), str(folder.parent)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        port = next(int(line.rpartition(":")[2]) for line in process.stderr if line.startswith("ready "))
        yield port, time.perf_counter() - start, process.pid
        process.terminate()
    assert process.returncode == 0


def post(connection: http.client.HTTPConnection, data: bytes) -> None:
    """One image, one verdict."""
    connection.request("POST", "/classify", data)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body


def peak_memory(process: int) -> float:
    """The most memory that a process held so far, in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    return float(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main()
