"""A serving pipeline with its rollout, without a process."""

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from edge.bundle.verification import Verifier
from edge.inference import pipeline
from edge.inference.outcomes import Failure, Notice, Outcome, Verdict
from edge.inference.pipeline import Frame, Pipeline
from edge.inference.predictor import Outputs, Predictor
from edge.registry import pre_rollout_checks
from edge.registry.bundle_store import BundleStore
from edge.registry.pre_rollout_checks import Gate
from edge.registry.rollout import Rollout
from tests.support.tiny_bundle import BLUE, GREEN, RED
from tests.support.waiting import wait_until

COLORS = (RED, GREEN, BLUE)


class Kept(list[Outcome]):
    """An outbox that keeps what it gets."""

    put = list.append

    @property
    def notices(self) -> list[str]:
        return [each.text for each in self if isinstance(each, Notice)]


class Running:
    """A line that lives, without a process."""

    def __init__(self, rollout: Rollout, line: Pipeline, outbox: Kept, digests: list[str]) -> None:
        self.rollout, self.line, self.outbox, self.digests = rollout, line, outbox, digests
        self.store = rollout.store

    def judge(self, frames: int = 1) -> list[Verdict | Failure]:
        seen = [
            self.line.inspect_sync(Frame(str(number), COLORS[number % 3]))
            for number in range(frames)
        ]
        return [each if isinstance(each, Failure) else each.verdict for each in seen]

    def until(self, digest: str) -> None:
        """Wait until this bundle is served, and the store says so."""
        wait_until(lambda: {self.store.state().active, self.line.model.digest} == {digest})


@contextlib.contextmanager
def running(
    store: BundleStore,
    digests: list[str],
    gate: Gate,
    verifier: Verifier | None = None,
    doubter: Any = None,
) -> Iterator[Running]:
    rollout, outbox = Rollout(store, gate, verifier), Kept()
    monitors = [each for each in (doubter, rollout) if each]
    with (
        contextlib.closing(Pipeline(rollout.load_first(None), outbox, monitors=monitors)) as line,
        rollout.manage(line),
    ):
        yield Running(rollout, line, outbox, digests)


@contextlib.contextmanager
def simulated_latencies(default: float = 0.001) -> Iterator[dict[int, float]]:
    """Seconds that the models of each round take, on a clock that nothing else moves,
    however busy the machine is.
    """
    latencies: dict[int, float] = {}
    now, lock, run = 0.0, threading.Lock(), Predictor.run

    def timed(predictor: Predictor, *arguments: Any) -> Outputs:
        nonlocal now
        with lock:
            now += latencies.get(predictor.manifest.round, default)
        return run(predictor, *arguments)

    clock = SimpleNamespace(perf_counter=lambda: now, sleep=lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline, pre_rollout_checks):
            patch.setattr(module, "time", clock)
        patch.setattr(pre_rollout_checks, "REST", 0.0)
        patch.setattr(Predictor, "run", timed)
        yield latencies
