"""The measurements, of all services in turn,
so that whatever else the machine does meets all of them.
"""

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.serving import services
from benchmarks.serving.onnxruntime_baseline import Bare
from benchmarks.serving.services import Questions, Service
from edge.bundle import bundle_format
from edge.http.prometheus_metrics import CountingConsumer, Metrics
from edge.inference.pipeline import Frame, NullConsumer, Pipeline
from edge.inference.served_model import load_model

WARM_UP = 20  # calls
STARTS = 5  # of the daemon
TURN = 3.0  # seconds of steady load, for one after another

Call = Callable[[], Awaitable[object]]


class Figures(msgspec.Struct):
    """One contestant's: milliseconds of a call, and of the processor's time."""

    p50: float
    p99: float
    processor: float | None = None


class Memory(msgspec.Struct):
    """Seconds until a service answered, and MB of memory after all calls."""

    ready: float
    memory: float


class Report(msgspec.Struct):
    """All that was measured, by contestant."""

    calls: dict[str, Figures]  # one after another, as fast as they are answered
    steady: dict[str, Figures]  # at a steady rate
    services: dict[str, Memory]


def measure(
    folder: Path, threads: int, count: int, rate: float, seconds: float, *, others: bool
) -> Report:
    """Measure `count` calls of each, then `seconds` of steady load,
    `rate` calls a second; `others` beside ours.
    """
    manifest = bundle_format.read_bundle(folder).manifest
    size = manifest.input.size
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    ready = []
    for _ in range(STARTS):
        with services.daemon(folder, manifest, threads, pixels) as starting:
            ready.append(starting.ready)
    with contextlib.ExitStack() as closing:
        running = {
            "edge-node": closing.enter_context(services.daemon(folder, manifest, threads, pixels))
        }
        running["bare protocol"] = closing.enter_context(
            services.bare_protocol(folder, threads, pixels)
        )
        sockets = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        running["bare protocol, Unix socket"] = closing.enter_context(
            services.bare_protocol(folder, threads, pixels, sockets / "service")
        )
        if others:
            running["FastAPI"] = closing.enter_context(services.plain(folder, threads, pixels))
            running["LitServe"] = closing.enter_context(services.lit(folder, threads, pixels))
        metrics = Metrics()
        outcomes = CountingConsumer(metrics, NullConsumer())
        pipeline = Pipeline(
            load_model(folder, threads=threads), outcomes, monitors=[metrics.observe]
        )
        closing.enter_context(contextlib.closing(pipeline))
        calls = in_process(pipeline, Bare(folder, threads), pixels) | over_http(running)
        report: Report = uvloop.run(_measured(calls, running, count, rate, seconds))
        running["edge-node"].ready = median(ready)
        report.services |= {
            name: Memory(each.ready, each.memory()) for name, each in running.items()
        }
    return report


def in_process(pipeline: Pipeline, bare: Bare, pixels: NDArray[np.uint8]) -> dict[str, Call]:
    """The bare session, and what the line makes of it."""

    async def session() -> None:
        bare.run(pixels[None])

    return {
        "session.run": session,
        "Pipeline.infer": lambda: pipeline.infer(pipeline.model, pixels[None]),
        "Pipeline.classify": lambda: pipeline.classify(Frame("benchmark", pixels)),
    }


def over_http(running: Mapping[str, Service]) -> dict[str, Call]:
    """Each service, asked about an array and about a file."""

    def asking(service: Service, question: bytes) -> Call:
        async def ask() -> None:
            service.ask(question)

        return ask

    return {
        f"{name}, {what}": asking(service, question)
        for what in Questions._fields
        for name, service in running.items()
        if (question := getattr(service.questions, what))
    }


async def _measured(
    calls: dict[str, Call], running: Mapping[str, Service], count: int, rate: float, seconds: float
) -> Report:
    times: dict[str, list[float]] = {name: [] for name in calls}
    # who comes after another's model finds the caches as that has left them
    order = random.Random(0)
    for number in range(WARM_UP + count):
        for name, call in order.sample([*calls.items()], len(calls)):
            start = time.perf_counter()
            await call()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    steady = await _steady(calls, running, rate, seconds)
    return Report({name: _figures(found) for name, found in times.items()}, steady, {})


async def _steady(
    calls: dict[str, Call], running: Mapping[str, Service], rate: float, seconds: float
) -> dict[str, Figures]:
    """Each in turn for a few seconds, several times over."""
    paced = {name: call for name, call in calls.items() if not name.endswith("image")}
    times: dict[str, list[float]] = {name: [] for name in paced}
    used = dict.fromkeys(paced, 0.0)
    for _ in range(max(1, round(seconds / TURN))):
        for name, call in paced.items():
            service = running.get(name.rpartition(",")[0])
            processor = service.processor if service else time.process_time
            before = processor()
            times[name] += await _paced(call, rate)
            used[name] += processor() - before
    return {name: _figures(found, used[name]) for name, found in times.items()}


async def _paced(call: Call, rate: float) -> list[float]:
    """Seconds of each call, from when it was due: who is late pays for it."""
    begin = time.perf_counter()
    times = []
    for number in range(round(TURN * rate)):
        due = begin + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return times


def _figures(times: list[float], processor: float | None = None) -> Figures:
    p50, p99 = (1000 * float(np.quantile(times, share)) for share in (0.5, 0.99))
    return Figures(p50, p99, None if processor is None else 1000 * processor / len(times))
