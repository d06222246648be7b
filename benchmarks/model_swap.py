"""Effects of a new model on serving: latencies over HTTP while the gate tries it out, and memory.

    python -m benchmarks.model_swap bundles/plant-1

A steady load of one image every 50 ms; then the bundle and a copy of it under another digest are
activated in turn. Shown are milliseconds of a request in peace and while a gate was at work, how
long that took, and the daemon's memory (VmRSS).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from edge.bundle.bundle_format import MANIFEST
from edge.registry.bundle_store import BundleStore, line_store
from edge.registry.control_requests import Request, send_request

PERIOD = 0.05  # seconds
PEACE = 20.0  # seconds
SWAPS = 7  # odd: one is on probation at the end


class Load(threading.Thread):
    """Sends an image every PERIOD seconds and notes when,
    and how many milliseconds its answer took.
    """

    def __init__(self, url: str, image: bytes) -> None:
        super().__init__()
        self.answers: list[tuple[float, float]] = []
        self.done = threading.Event()
        self._url, self._image = url, image

    def run(self) -> None:
        """Send until it is done."""
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self.done.is_set():
                start = time.perf_counter()
                client.post("/classify", content=self._image).raise_for_status()
                taken = time.perf_counter() - start
                self.answers.append((start, 1000 * taken))
                time.sleep(max(0.0, PERIOD - taken))


def stored(folder: Path, source: Path) -> tuple[BundleStore, list[str]]:
    """A store with the bundle and a copy of another round; the bundle is served."""
    copy = shutil.copytree(source, folder / "copy")
    content = json.loads((copy / MANIFEST).read_bytes())
    (copy / MANIFEST).write_text(json.dumps(content | {"round": content["round"] + 1}))
    store = line_store(folder, "line-1")
    digests = [store.add(each, "benchmark") for each in (source, copy)]
    store.record_activation(digests[0], "benchmark", trial=False)
    return store, digests


def memory(process: int) -> float:
    """VmRSS in MB."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1000


def told(name: str, milliseconds: list[float]) -> None:
    """Print a row."""
    p50, p95, p99, most = np.percentile(milliseconds, (50, 95, 99, 100))
    print(
        f"{name:15} {len(milliseconds):5} requests  p50 {p50:6.1f}  p95 {p95:6.1f}  p99 "
        f"{p99:6.1f}  max {most:6.1f} ms"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, help="an unsigned bundle")
    bundle = parser.parse_args().bundle
    with tempfile.TemporaryDirectory() as name:
        store, digests = stored(Path(name), bundle)
        command = [sys.executable, "-m", "edge_node", "serve", "--port", "0", "--state", name]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
            assert daemon.stderr
            url = next(line.split()[1] for line in daemon.stderr if line.startswith("ready "))
            # or its pipe would fill
            threading.Thread(target=daemon.stderr.read, daemon=True).start()
            load = Load(url, (bundle / "golden.png").read_bytes())
            load.start()
            time.sleep(PEACE)
            before, spans = memory(daemon.pid), []
            for swap in range(1, SWAPS + 1):
                request = Request(
                    action="activate", by="benchmark", bundle=digests[swap % 2], force=True
                )
                start = time.perf_counter()
                assert send_request(store.folder, request, 60, store.is_locked).done
                spans.append((start, time.perf_counter()))
                time.sleep(1)
            after = memory(daemon.pid)
            load.done.set()
            load.join()
            daemon.terminate()
    first = spans[0][0]
    told("in peace", [taken for start, taken in load.answers[20:] if start < first])
    told(
        "during a gate",
        [taken for start, taken in load.answers for begun, end in spans if begun <= start <= end],
    )
    print(f"a gate took {', '.join(f'{end - begun:.1f}' for begun, end in spans)} s")
    print(f"memory {before:.0f} MB before, {after:.0f} MB with two models on probation")


if __name__ == "__main__":
    main()
