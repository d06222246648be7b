"""The round that a sensor works on, and the products that it needs: pure, without broker,
clock or data.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_node.extensions.vfl.checkpoint import KEPT
from edge_node.extensions.vfl.frames import Graded, Opened, Represented
from edge_node.extensions.vfl.messages import VflSpec

_REMEMBERED = KEPT + 1  # groups of rounds whose products are known beside those of the newest round
_MOST_PLACES = 200_000  # 3 MB in each checkpoint
_LARGEST_ROUND = 1 << 30  # bytes of a round's samples and embeddings: 600,000 products of C-MAPSS


class TargetRound(NamedTuple):
    """The newest round that opened."""

    frame: Opened
    since: float  # when its opening arrived
    late: frozenset[str] = frozenset()  # products without a sample at the last reading of the file
    sent: bool = False  # its embeddings are: what is next is the head's reply


class ProductPositions:
    """The products of a stretch of positions, as far as the head has sent them."""

    def __init__(self) -> None:
        self._first = 0
        self._products: list[str] = []

    def put(self, since: int, products: Sequence[str], most: int) -> None:
        """Add the products from position `since` on; drop those that are not adjacent,
        and all but the last `most`.
        """
        start = since - self._first
        if not 0 <= start <= len(self._products):
            self._first = since
            self._products = []
            start = 0
        self._products[start : start + len(products)] = products
        self.drop_before(self._first + len(self._products) - most)

    def drop_before(self, before: int) -> None:
        """Drop earlier positions, to bound memory."""
        dropped = min(max(0, before - self._first), len(self._products))
        del self._products[:dropped]
        self._first += dropped

    def get(self, first: int, last: int) -> list[str] | None:
        """The products at [first, last); None if one of them is not known."""
        if first < self._first or last > self._first + len(self._products):
            return None
        return self._products[first - self._first : last - self._first]


class ReleasedSamples:
    """Where a protected run's samples stand among the head's positions.

    The account counts the rounds in whose window a position lies. A head that names a product at a
    later position again has the same sample embedded more often than that. A sample is known by a
    digest of its product and its values: the id of a very old product may come again with others.

    Args:
        kept: the `array` of an earlier process.
    """

    def __init__(self, kept: NDArray[np.int64] | None = None) -> None:
        self._positions: dict[int, int] = {}
        if kept is not None:
            self._positions = dict(kept.tolist())

    @property
    def array(self) -> NDArray[np.int64]:
        """Digest and position of each, int64 [n, 2]."""
        return np.array([*self._positions.items()], np.int64).reshape(-1, 2)

    def place(
        self,
        first: int,
        products: Sequence[str],
        samples: NDArray[np.float32],
        missing: Collection[int],
    ) -> str | None:
        """Note the samples of the products from position `first` on, before they leave.

        Return a product whose sample has left from another position. None is noted then.
        """
        found: dict[int, int] = {}
        lacking = frozenset(missing)
        for row, product in enumerate(products):
            if row in lacking:
                continue
            digest = hashlib.blake2b(samples[row].tobytes(), digest_size=8)
            digest.update(product.encode())
            key = int.from_bytes(digest.digest(), "little", signed=True)
            if self._positions.get(key, first + row) != first + row:
                return product
            found[key] = first + row
        self._positions |= found
        for oldest in [*self._positions][: max(0, len(self._positions) - _MOST_PLACES)]:
            del self._positions[oldest]
        return None


def check_frame(frame: Opened | Represented | Graded, spec: VflSpec, product: int = 0) -> None:
    """ValueError says what the head cannot ask of a sensor: other products than the spec's,
    more iterations, or memory.

    `product` is what a product takes at this sensor, bytes.
    """
    match frame:
        case Opened(first=first, last=last, since=since, products=products):
            if (last - first) * product > _LARGEST_ROUND:
                raise ValueError(
                    f"a round of {last - first} products would take {(last - first) * product} "
                    f"bytes of memory here, {_LARGEST_ROUND} at most: ask for a smaller --window "
                    "or fewer --cycles"
                )
            if frame.round < 1 or (first, last) != spec.window.span(frame.round):
                raise ValueError(
                    f"positions {first} to {last} are not those of round {frame.round}"
                )
            if not min(first, last - spec.window.chunk) <= since <= last - len(products):
                raise ValueError(
                    f"{len(products)} products from position {since} on are not those of {first} "
                    f"to {last}"
                )
            return
        case Represented(iterations=steps):
            most = max(steps, default=0)
        case Graded(iterations=most):
            pass
    if most > spec.iterations:
        raise ValueError(f"{most} local iterations, of {spec.iterations} at most")


def positions_to_keep(spec: VflSpec, round_: int) -> int:
    """The most products that a sensor has to know in a round:
    those of its checkpoints' rounds, too.
    """
    first, last = spec.window.span(round_)
    return last - first + _REMEMBERED * spec.commit * spec.window.chunk


def is_newer(frame: Opened, attempt: int, round_: int) -> bool:
    """Whether a sensor that has learnt from `round_` in `attempt` has yet to take part in this
    round.
    """
    return frame.attempt > attempt or (frame.attempt == attempt and frame.round > round_)


def is_skipped(frame: Represented | Graded, index: int) -> bool:
    """Whether the head has closed a round without the sensor that is its `index`-th."""
    steps = frame.iterations if isinstance(frame, Graded) else frame.iterations[index : index + 1]
    return steps in (0, (0,))


class MissingRows(NamedTuple):
    """How long rounds wait for products that a sensor has no rows of yet,
    where they need not wait for ever.

    Once the newest product has taken too long, none is waited for until rows come in time again: a
    file that lags behind must not cost every round the same wait.
    """

    patience: float  # seconds
    behind: bool = False
    given_up: Mapping[str, float] = MappingProxyType({})  # product -> when it was asked for first

    def check(
        self, products: Sequence[str], lacking: Set[str], waited: float, now: float
    ) -> tuple["MissingRows", bool]:
        """Whether a round of these `products`, opened `waited` seconds ago,
        is to wait for those that are lacking.
        """
        given_up = {name: at for name, at in self.given_up.items() if name in lacking}
        came = set(products) & self.given_up.keys() - lacking if self.given_up else ()
        behind = self.behind and not any(now - self.given_up[name] < self.patience for name in came)
        fresh = lacking - given_up.keys()
        if fresh and not behind and waited < self.patience:
            return MissingRows(self.patience, behind, given_up), True
        behind = bool(fresh) and products[-1] in lacking
        return MissingRows(
            self.patience, behind, given_up | dict.fromkeys(fresh, now - waited)
        ), False
