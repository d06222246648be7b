"""Runs of a federation that only choose the encoder and the input size of the run after them.

Theory of operation: a choice is a chain of ordinary runs in one state folder. There is one choosing
run for each input size, of one round of sums, in which each node tells the coordinator what leaving
out its images costs with each encoder; then the run that is wanted. Two things say where the chain
stands, and each changes in one durable step: the newest run in the journal, and `encoders.json`.

1. A choice begins with an empty `encoders.json`; then the journal begins the first choosing run.
2. What a node tells is in `encoders.json` before the journal says that the node has finished.
3. A choosing run is marked as ended there before the journal begins the next run.

So a coordinator that is killed between any two of these steps goes on with the newest run, unless
that has ended; and what has ended is never run again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from broker_config.protocol.messages import Encryption, Spec
from trainer.federation.server.coordinator.process import Outcome
from trainer.federation.server.journal import Run
from trainer.federation.server.ledger import Ledger, has_begun
from trainer.federation.server.spec import Participation, Request, draft
from trainer.methods import PREVIEW
from trainer.models.catalogue import CANDIDATE_SIZES, CANDIDATES, DEFAULT_SIZE
from trainer.models.initial_weights import choose_weights
from trainer.models.named_tensors import Arrays
from trainer.progress import Note, Report
from trainer.statistics.encoder_choice import (
    Cost,
    EncoderLosses,
    choose,
    describe,
    end,
    write_down,
)


class NextRun(NamedTuple):
    """The choosing run that is due."""

    size: int  # pixels of its images
    new: bool  # the newest run of the state folder is another one


class Choice(NamedTuple):
    """What the run that is wanted begins with."""

    chosen: Cost
    costs: list[Cost]  # what it was compared with; empty if nothing could be compared


class Federation(NamedTuple):
    """What all runs of a federation share, whatever they train."""

    name: str
    classes: Sequence[str]
    nodes: int
    participation: Participation
    aliases: Mapping[str, str] = {}
    encryption: Encryption = "none"

    def draft(self, request: Request, *, chooses: bool = False) -> tuple[Spec, Arrays]:
        """Return the spec and the first broadcast of a run, as `spec.draft` does.

        In one that `chooses` all nodes take part, of which the same number suffices.
        """
        participation = self.participation
        if chooses:
            quorum = participation.quorum or participation.sample
            participation = participation._replace(quorum=quorum, sample=0)
        return draft(
            request,
            federation=self.name,
            classes=self.classes,
            nodes=self.nodes,
            participation=participation,
            aliases=self.aliases,
            encryption=self.encryption,
            chooses=chooses,
        )


def choose_encoder(
    ledger: Ledger,
    federation: Federation,
    wanted: Request,
    size: int,
    run: Callable[[Spec, Arrays, Report, bool], Outcome | None],
    report: Report,
    *,
    new: bool,
) -> Choice | None:
    """Run the choosing runs that are due, and return the choice; None if one was suspended.

    Args:
        ledger: of the federation.
        federation: what its runs share.
        wanted: the run that follows.
        size: pixels of the images, if the choice is among encoders alone; else 0.
        run: coordinates a run that is drafted, a new one or the newest of the ledger; returns None
            if it was suspended.
        report: shows progress.
        new: whether a choice begins anew.

    Raises: as `run`.
    """
    sizes = wanted_sizes(size)
    while (due := find_next(ledger.run, ledger.folder, sizes, new=new)) is not None:
        new = False
        weights = {model: choose_weights(model) for model in CANDIDATES}
        writing = write_down(report, ledger.folder, weights, len(federation.classes), due.size)
        report(Note(text=f"comparing {', '.join(CANDIDATES)} at {due.size} px"))
        spec, broadcast = federation.draft(make_request(wanted, due.size), chooses=True)
        if run(spec, broadcast, writing, due.new) is None:
            return None
        assert ledger.run is not None
        end(ledger.folder, ledger.run.spec.run)
    costs = EncoderLosses.load(ledger.folder).costs(sizes)
    if not costs:
        report(Note(text="no plant had an image to leave out: taking the default encoder"))
        return Choice(default_candidate(sizes), [])
    chosen = choose(costs)
    for line in describe(costs, chosen):
        report(Note(text=line))
    return Choice(chosen, costs)


def wanted_sizes(size: int) -> tuple[int, ...]:
    """Return the sizes that are compared, if a federation names `size`, or 0 for none."""
    return (size,) if size else CANDIDATE_SIZES


def find_next(
    newest: Run | None, folder: Path, sizes: Sequence[int], *, new: bool
) -> NextRun | None:
    """Return the choosing run to start or go on with; None if the wanted run comes next.

    Args:
        newest: run of the state folder.
        folder: that state folder.
        sizes: of images, that are to be compared.
        new: whether a choice begins anew.
    """
    if newest is None or new:
        if newest is None or not has_begun(newest):
            EncoderLosses().save(folder)
        return NextRun(sizes[0], new)
    if not newest.spec.chooses:
        return None
    known = EncoderLosses.load(folder)
    told = known.find(newest.spec.run)
    if newest.outcome != "finished" or (told and not told.ended):
        return NextRun(newest.spec.preprocessing.size, new=False)
    if told is None:  # the file was lost
        EncoderLosses().save(folder)
        return NextRun(sizes[0], new=True)
    left = known.left(sizes)
    return NextRun(left[0], new=True) if left else None


def make_request(wanted: Request, size: int) -> Request:
    """Return the choosing run for images of one size, with what it shares with the `wanted` run."""
    model, *others = CANDIDATES
    return Request(
        method=PREVIEW,
        options={"others": ",".join(others)},
        model=model,
        weights=choose_weights(model),
        size=size,
        seed=wanted.seed,
        threads=wanted.threads,
        codec=wanted.codec,
    )


def default_candidate(sizes: Sequence[int]) -> Cost:
    """Return what a federation takes where nothing was compared."""
    model = CANDIDATES[0]
    size = DEFAULT_SIZE[model] if DEFAULT_SIZE[model] in sizes else sizes[-1]
    return Cost(model, choose_weights(model), size, math.inf)
