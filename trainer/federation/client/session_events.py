"""Events of a node's session, and their effects: what its state machine is told,
and what it wants done.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import (
    AnyMessage,
    Contribution,
    Delta,
    Manifest,
    MaskingStep,
    Refusal,
)
from broker_config.transfer.blob_transfer import Damaged, Fetched, FetchFailed
from trainer.federation.client.checkpoint import Progress
from trainer.progress import timeline
from trainer.progress.events import AnyEvent, ModelReady

# Events


class Started(NamedTuple):
    """The connections are open."""

    damaged: Sequence[Path] = ()  # files of the state folder


class Connected(NamedTuple):
    """The connection is there, for the first time or again."""


class Tick(NamedTuple):
    """Time passes."""

    now: float  # seconds since the session began


class Received(NamedTuple):
    """A message has come."""

    message: AnyMessage
    topic: str = ""


class Contributed(NamedTuple):
    """Stage 1 is on disk; stage 2 has begun."""

    progress: Progress


class Refined(NamedTuple):
    """The round is on disk."""

    progress: Progress


class Deployed(NamedTuple):
    """The personal model, or the preview, is on disk."""

    path: Path
    lines: Sequence[str]  # what is to be said of it
    metrics: Mapping[str, float]  # what the coordinator is told of it


class Begun(NamedTuple):
    """The model of the first sums is on disk; training goes on."""

    ready: ModelReady
    lines: Sequence[str]  # what is to be said of it


class Failed(NamedTuple):
    """What was to be trained, or deployed, has raised."""

    error: BaseException


class Looked(NamedTuple):
    """Answer to Look."""

    digest: str
    is_intact: bool
    path: Path


class Served(NamedTuple):
    """Answer to Serve."""

    blob: Manifest  # in chunks that the broker takes
    is_intact: bool
    path: Path


class WentBack(NamedTuple):
    """Answer to GoBack."""

    effect: "GoBack"
    progress: Progress | None
    is_exact: bool  # that state was kept, and no nearby one is taken


class Applied(NamedTuple):
    """Answer to Apply."""

    delta: Delta
    is_made: bool  # the broadcast is there


class CanMask(NamedTuple):
    """Answer to AnswerStep: the masks of this round are known."""

    round: int


class Masked(NamedTuple):
    """Answer to Mask."""

    blob: Manifest | None  # None if what it is made from is damaged
    path: Path  # of that


Answer = Looked | Served | WentBack | Applied | CanMask | Masked
Event = (
    Started
    | Connected
    | Tick
    | Received
    | Contributed
    | Refined
    | Begun
    | Deployed
    | Fetched
    | FetchFailed
    | Damaged
    | Answer
)


# Effects


class Announce(NamedTuple):
    """Say that this node is there, and how far."""

    round: int
    is_served: bool


class Send(NamedTuple):
    """Send a contribution."""

    message: Contribution


class TellFinished(NamedTuple):
    """Tell the coordinator that nothing more is needed."""


class TellMetrics(NamedTuple):
    """Report what was measured in a round."""

    progress: Progress


class TellOutcome(NamedTuple):
    """Tell the coordinator what the model, or the preview, has measured."""

    metrics: Mapping[str, float]


class CheckRun(NamedTuple):
    """End the session if the broker retains the spec of a newer run:
    what told of one may be old.
    """

    refusal: Refusal | None = None  # which ends it otherwise, if it is meant for this process


class Look(NamedTuple):
    """Look whether a blob is on the disk, intact. Answered at once."""

    digest: str


class Fetch(NamedTuple):
    """Fetch a blob; Fetched or FetchFailed follow."""

    manifest: Manifest


class Cancel(NamedTuple):
    """Fetch it no more."""

    manifest: Manifest


class Serve(NamedTuple):
    """Serve a blob to the coordinator. Answered at once."""

    blob: Manifest


class Apply(NamedTuple):
    """Make a broadcast, or the run's result, of the one before it and of a delta that has arrived.

    Answered at once.
    """

    delta: Delta
    broadcast: Manifest
    is_final: bool


class TellKeys(NamedTuple):
    """Say with which keys this node shares masks in a round; steps follow."""

    round: int


class AnswerStep(NamedTuple):
    """Do what a step of a round's masks asks for.

    Answered at once where it makes the masks known.
    """

    step: MaskingStep


class Mask(NamedTuple):
    """Make the contribution that others may see. Answered at once."""

    progress: Progress


class Withdraw(NamedTuple):
    """Serve it no more."""

    digest: str


class Purge(NamedTuple):
    """Remove all blobs but these."""

    kept: frozenset[str]


class Train(NamedTuple):
    """Begin the round that starts from a broadcast, or go on with its stage 2;
    Contributed and Refined follow.
    """

    broadcast: Manifest
    counted: bool  # whether the round before holds this node's part


class GoBack(NamedTuple):
    """Go back to before a round. Answered at once."""

    round: int
    again: Manifest | None = None  # a broadcast to train with once more


class Deploy(NamedTuple):
    """Make the personal model, or the preview, of the run's result; Deployed follows."""

    final: Manifest
    counted: bool  # whether it holds this node's part


class Begin(NamedTuple):
    """An activity begins."""

    activity: timeline.Activity
    round: int


class End(NamedTuple):
    """An activity ends."""

    activity: timeline.Activity


class OpenRound(NamedTuple):
    """Report that a round has opened, and the one before has closed."""

    round: int


class CloseRound(NamedTuple):
    """Report that the last round has closed."""


class Report(NamedTuple):
    """Report to people."""

    event: AnyEvent


class Fail(NamedTuple):
    """End the session by an error."""

    error: EdgeNodeError
    cause: Exception | None = None


Effect = (
    Announce
    | Send
    | TellFinished
    | TellMetrics
    | TellOutcome
    | CheckRun
    | Look
    | Fetch
    | Cancel
    | Apply
    | Serve
    | TellKeys
    | AnswerStep
    | Mask
    | Withdraw
    | Purge
    | Train
    | GoBack
    | Deploy
    | Begin
    | End
    | OpenRound
    | CloseRound
    | Report
    | Fail
)
