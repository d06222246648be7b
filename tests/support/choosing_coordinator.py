"""What makes a forked `edge-node coordinate` compare small encoders at small sizes,
and die at a write.

With DIE_BEFORE or DIE_AFTER=KIND in its environment it ends, as if killed, on that side of its
first durable write of this kind: a fact of the journal, or of encoders.json: `forgotten`, `told by
NUMBER` of nodes, `ended`.
"""

import os
from collections.abc import Callable
from typing import Any

from trainer.federation.server import choosing_runs
from trainer.federation.server.journal import Journal
from trainer.statistics.encoder_choice import EncoderLosses

CANDIDATES = ("small", "efficientnet_lite0")
SIZES = (32, 48)
CODE = 77  # of a process that has died so


def die_at(kind: str, write: Callable[[], Any]) -> None:
    """Write, unless the process is to die at such a write."""
    if os.environ.get("DIE_BEFORE") == kind:
        os._exit(CODE)
    write()
    if os.environ.get("DIE_AFTER") == kind:
        os._exit(CODE)


def compare_small_ones() -> None:
    """Prepare the process."""
    choosing_runs.CANDIDATES = CANDIDATES  # type: ignore[assignment]
    choosing_runs.CANDIDATE_SIZES = SIZES
    commit = Journal._commit
    save = EncoderLosses.save

    def commit_or_die(journal: Journal, kind: str, *statements: Any) -> None:
        die_at(kind, lambda: commit(journal, kind, *statements))

    def save_or_die(losses: EncoderLosses, folder: Any) -> None:
        kind = "forgotten"
        if losses.runs:
            newest = losses.runs[-1]
            kind = "ended" if newest.ended else f"told by {len(newest.nodes)}"
        die_at(kind, lambda: save(losses, folder))

    Journal._commit = commit_or_die  # type: ignore[method-assign]
    EncoderLosses.save = save_or_die  # type: ignore[method-assign]
