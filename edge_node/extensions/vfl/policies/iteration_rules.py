"""Rules that decide local iterations from timings, without having learnt anything."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_node.extensions.vfl.policies.latency import Floats, Ints, disparity
from edge_node.extensions.vfl.policies.policy import Policy, Timing
from trainer.seeding import generator

DISPARITY_COST = (
    # what HE's disparity costs, in rounds of HO: the weight that all rules and rewards give to
    # disparity
    0.25
)
_Number = TypeVar("_Number", np.float64, np.int64)
_MEMORY = 50  # rounds that the deadline rule's means look back
# candidates at most: bounds the work of a round
_DEADLINES = 200
_CAPS = 40


def ones(sensors: int) -> Ints:
    """The least that every sensor does."""
    return np.ones(sensors, np.int64)


def largest_disparity(sensors: int, most: int) -> float:
    """The disparity of HE's decision; 1 where there can be none."""
    decision = ones(sensors)
    decision[-1] = most
    return float(disparity(decision)) or 1.0


class Uniform:
    """Every sensor takes as many: HO with E_max (`all`), or 1 (`least`)."""

    def __init__(self, iterations: int):
        self._iterations = iterations

    def __call__(self, timing: Timing, round_: int) -> Ints:  # noqa: ARG002
        """Decide."""
        return self._iterations * ones(len(timing.iteration))


class OnlyLast:
    """HE: the last sensor, which collects last and is a slow one, takes E_max,
    all others 1 (paper: predetermined).
    """

    def __init__(self, iterations: int):
        self._iterations = iterations

    def __call__(self, timing: Timing, round_: int) -> Ints:  # noqa: ARG002
        """Decide."""
        decision = ones(len(timing.iteration))
        decision[-1] = self._iterations
        return decision


class Proportional:
    """The fastest sensor takes E_max, the others as many as they compute in the same time."""

    def __init__(self, iterations: int):
        self._iterations = iterations

    def __call__(self, timing: Timing, round_: int) -> Ints:  # noqa: ARG002
        """Decide."""
        time = self._iterations * timing.iteration.min(keepdims=True)
        return iterations_within(timing.iteration, time, self._iterations)


class Random:
    """Anything, by (seed, round)."""

    def __init__(self, iterations: int, seed: int = 0):
        self._iterations = iterations
        self._seed = seed

    def __call__(self, timing: Timing, round_: int) -> Ints:
        """Decide."""
        random = generator(self._seed, "decision", round_)
        return np.asarray(
            random.integers(1, self._iterations, len(timing.iteration), endpoint=True)
        )


class Deadline:
    """Matches a deadline: of the candidates the one with the best balance of iterations,
    latency and disparity.

    Until a deadline each sensor takes as many iterations as fit, up to a cap that all have in
    common. Their worth rises with the logarithm of their mean, for learning has diminishing
    returns, and from 1 to E_max it is the latency that this costs on average of the last rounds. So
    more are taken in rounds where they are cheap, and none of it needs units, training, or
    knowledge of the learning curve.
    """

    def __init__(self, iterations: int):
        self._iterations = iterations
        # mean latencies if all take 1, or E_max
        self._rounds = 0
        self._least = 0.0
        self._full = 0.0

    def __call__(self, timing: Timing, round_: int) -> Ints:  # noqa: ARG002
        """Decide."""
        sensors = len(timing.iteration)
        most = self._iterations
        self._remember(timing.latency(ones(sensors)), timing.latency(most * ones(sensors)))
        worth = (self._full - self._least) / np.log(max(2, most))
        uneven_costs = DISPARITY_COST * self._full / largest_disparity(sensors, most)
        tried = candidates(timing, most)
        latency = (timing.collection + timing.communication + tried * timing.iteration).max(-1)
        gain = worth * np.log(tried.mean(-1)) - latency - uneven_costs * disparity(tried)
        return np.asarray(tried[gain.argmax()])

    def _remember(self, least: float, full: float) -> None:
        self._rounds = min(self._rounds + 1, _MEMORY)
        self._least += (least - self._least) / self._rounds
        self._full += (full - self._full) / self._rounds


def candidates(timing: Timing, most: int) -> Ints:
    """Decisions [N, K] that fit a deadline, for deadlines at which a sensor ends an iteration
    and all caps.
    """
    before = timing.collection + timing.communication
    steps = np.arange(1, most + 1)
    ends = np.unique(before + steps[:, None] * timing.iteration)
    ends = ends[ends >= (before + timing.iteration).max()]
    fit = iterations_within(timing.iteration, _spread(ends, _DEADLINES)[:, None] - before, most)
    capped = np.minimum(fit[:, None], _spread(steps, _CAPS)[:, None])
    return np.unique(capped.reshape(-1, len(before)), axis=0)


def iterations_within(iteration: Floats, time: Floats, most: int) -> Ints:
    """As many iterations as fit into `time` [..., K], from 1 to `most`."""
    count = np.floor(np.maximum(0, time) / iteration + 1e-9)
    return np.asarray(np.clip(count, 1, most), np.int64)


def _spread(values: NDArray[_Number], most: int) -> NDArray[_Number]:
    """All values, or so many evenly out of more: the first and the last among them."""
    places = np.linspace(0, len(values) - 1, min(most, len(values)))
    return np.asarray(values[places.round().astype(int)])


RULES: dict[str, Callable[[int], Policy]] = {
    "all": Uniform,
    "least": lambda _: Uniform(1),
    "one": OnlyLast,
    "proportional": Proportional,
    "random": Random,
    "deadline": Deadline,
}
