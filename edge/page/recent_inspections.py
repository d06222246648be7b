"""Recent inspections of a line, for people to look at: last image, defects, notices, pace.

In memory only.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Annotated, NamedTuple, TypedDict

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from edge.inference.outcomes import Failure, Notice, Outcome, Verdict
from edge.inference.pipeline import Inspection, OutcomeConsumer

# defects that are told; of as many again the pictures are held, since a page asks for them later
REJECTS = 12
NOTICES = 5
WINDOW = 60  # seconds over which the pace is taken
_LATENCIES = 256  # images over which percentiles are taken
PINNED = 4  # inspections whose whole frames are held for those who look at them
_WATCHED = 10.0  # seconds after a look at the line for which they are


class Reject(NamedTuple):
    """A defect, and what the network saw of it."""

    verdict: Verdict
    pixels: NDArray[np.uint8]  # [size, size, 3] RGB: the tile that decided


class Counts(NamedTuple):
    """Since the line was started."""

    images: int = 0
    defects: int = 0
    doubtful: int = 0
    failures: int = 0


class Latency(NamedTuple):
    """From an image's arrival to its verdict, with all waiting, in milliseconds."""

    median: float
    p95: float


class CountsTold(TypedDict):
    """Images since the line was started."""

    images: int
    defects: int
    doubtful: int
    failures: int


class LatencyTold(TypedDict):
    """Milliseconds from an image's arrival to its verdict, of the last 256 images."""

    median: float
    p95: float


class ShownVerdict(Struct, frozen=True, kw_only=True):
    """The part of a verdict that a page shows. Its tiles would be most of the message."""

    id: str
    image: Annotated[str, Meta(description="As its source called it")]
    label: str
    confidence: float
    defect: bool
    taught: Annotated[bool, Meta(description="Whether this plant ever taught the label")]
    doubts: tuple[str, ...]
    bundle: str
    time: str


class Snapshot(TypedDict):
    """What there is to see of recent inspections."""

    last: ShownVerdict | None
    failure: Annotated[Failure | None, Meta(description="If the last image could not be inspected")]
    counts: CountsTold
    per_minute: Annotated[float, Meta(description="Images in the last minute")]
    latency: LatencyTold | None
    rejects: Annotated[
        Sequence[ShownVerdict],
        Meta(max_length=REJECTS, description="The last defects, the newest first"),
    ]
    notices: Annotated[
        Sequence[Notice],
        Meta(max_length=NOTICES, description="The last messages of the line, the newest first"),
    ]


class RecentInspections:
    """A monitor and a consumer of outcomes, which it passes on.

    Of a frame it holds the network's pixels if it has a defect. Whole it holds the last one, and
    while somebody looks those that were last looked at.
    """

    def __init__(
        self, consumer: OutcomeConsumer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._consumer = consumer
        self._clock = clock
        self._lock = threading.Lock()
        self._last: Inspection | None = None
        self._pinned = OrderedDict[str, Inspection]()
        self._looked_at = float("-inf")  # by the clock
        self._rejects = deque[Reject](maxlen=2 * REJECTS)
        self._notices = deque[Notice](maxlen=NOTICES)
        self._failure: Failure | None = None
        self._counts = Counts()
        self._latencies = deque[float](maxlen=_LATENCIES)
        # a second, and the images inspected in it
        self._seconds = deque[tuple[int, int]](maxlen=WINDOW + 1)

    def observe(self, inspection: Inspection) -> Verdict:
        """Hold what led to a verdict, which stays as it is."""
        with self._lock:
            self._last = inspection
            self._latencies.append(1000 * (time.perf_counter() - inspection.arrived_at))
            if self._clock() - self._looked_at > _WATCHED:
                self._pinned.clear()
        return inspection.verdict

    def put(self, outcome: Outcome) -> None:
        """Remember an outcome, and pass it on."""
        with self._lock:
            self._remember(outcome)
        self._consumer.put(outcome)

    def _remember(self, outcome: Outcome) -> None:
        if isinstance(outcome, Notice):
            self._notices.append(outcome)
            return
        second = int(self._clock())
        counts = self._counts
        before = (
            self._seconds.pop() if self._seconds and self._seconds[-1][0] == second else (second, 0)
        )
        self._seconds.append((second, before[1] + 1))
        if isinstance(outcome, Failure):
            self._failure = outcome
            self._counts = counts._replace(failures=counts.failures + 1)
            return
        self._failure = None
        last = self._last
        self._counts = counts._replace(
            images=counts.images + 1,
            defects=counts.defects + outcome.defect,
            doubtful=counts.doubtful + bool(outcome.doubts),
        )
        if last and last.verdict.id == outcome.id:
            # monitors after this one may have amended it
            self._last = last._replace(verdict=outcome)
            if outcome.defect:
                self._rejects.append(Reject(outcome, last.tiled.pixels[last.tile].copy()))

    def snapshot(self, held: str = "") -> Snapshot:
        """What there is to see now, as values that JSON holds;
        the last image is then held to be looked at.

        So is, still, the one whose id is `held`.
        """
        now = self._clock()
        with self._lock:
            self._looked_at = now
            last = self._last
            if last:
                self._pinned[last.verdict.id] = last
                if held in self._pinned:
                    self._pinned.move_to_end(held)
                while len(self._pinned) > PINNED:
                    self._pinned.popitem(last=False)
            recent = sum(count for second, count in self._seconds if second > now - WINDOW)
            latencies = [*self._latencies]
            told: LatencyTold | None = None
            if latencies:
                latency = _percentiles(latencies)
                told = {"median": latency.median, "p95": latency.p95}
            counts = self._counts
            return {
                "last": last and _shown(last.verdict),
                "failure": self._failure,
                "counts": {
                    "images": counts.images,
                    "defects": counts.defects,
                    "doubtful": counts.doubtful,
                    "failures": counts.failures,
                },
                "per_minute": recent * 60 / WINDOW,
                "latency": told,
                "rejects": [
                    _shown(each.verdict) for each in islice(reversed(self._rejects), REJECTS)
                ],
                "notices": [*reversed(self._notices)],
            }

    def find(self, id_: str) -> Inspection | None:
        """An inspection of a snapshot, as long as it is held."""
        with self._lock:
            return self._pinned.get(id_)

    def find_reject(self, id_: str) -> Reject | None:
        """One of the last defects."""
        with self._lock:
            return next((each for each in self._rejects if each.verdict.id == id_), None)


def _shown(verdict: Verdict) -> ShownVerdict:
    return ShownVerdict(
        id=verdict.id,
        image=verdict.image,
        label=verdict.label,
        confidence=verdict.confidence,
        defect=verdict.defect,
        taught=verdict.taught,
        doubts=verdict.doubts,
        bundle=verdict.bundle,
        time=verdict.time,
    )


def _percentiles(milliseconds: list[float]) -> Latency:
    median, p95 = np.percentile(milliseconds, (50, 95))
    return Latency(round(float(median), 1), round(float(p95), 1))
