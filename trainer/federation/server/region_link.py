"""Link of a region's coordinator to the federation above: what it is told of that, and contributes to it."""

import queue
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainer.models.named_tensors import Arrays


class BroadcastAbove(NamedTuple):
    """The federation above has opened a round, or has finished."""

    round: int  # one more than the last if it has finished
    blob: Path  # that the round starts from, or the result
    digest: str
    delta: tuple[str, bytes] | None = None  # what makes it of the broadcast before: that one's digest, a coded blob


class RegionLink(NamedTuple):
    """What connects a region's coordinator with the federation above."""

    inbox: queue.Queue[object]  # the coordinator's, which takes BroadcastAbove
    forward: Callable[[int, Arrays], None]  # contributes a round's sums; returns once they are on disk
    forwarded: int  # the newest round whose sums are
