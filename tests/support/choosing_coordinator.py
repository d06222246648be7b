"""`edge-node coordinate` that compares small encoders at small sizes, and can die at a write.

    DIE_AFTER=concluded python -m tests.support.choosing_coordinator coordinate BROKER ...

With DIE_BEFORE or DIE_AFTER=KIND it ends, as if killed, on that side of its first durable write of
this kind: a fact of the journal, or `told` for encoders.json.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from edge.cli import main
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


def dying() -> None:
    """Wrap what writes facts of a choice."""
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    choosing_runs.CANDIDATES = CANDIDATES  # type: ignore[assignment]
    choosing_runs.CANDIDATE_SIZES = SIZES
    dying()
    main.main()
