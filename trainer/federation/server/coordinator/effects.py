"""Effects of a coordinator: what its machines want done, in order.

`Effect` is what the process performs. `Finding` is what the machines of the rounds and of the masks
have found out; the coordinator's machine makes effects of it.
"""

from collections.abc import Collection
from typing import NamedTuple

from broker_config.protocol.errors import EdgeNodeError, PeerError
from broker_config.protocol.messages import Accepted, Contribution, Hello, MaskingStep, Refusal
from trainer import progress
from trainer.federation.server.coordinator.masking_state import Facts, Masking

# Rounds


class Open(NamedTuple):
    """Broadcast, and let the nodes train: those that were drawn or, if none were, all."""

    round: int
    drawn: frozenset[str] = frozenset()


class Close(NamedTuple):
    """Average what came."""

    round: int
    contributors: frozenset[str]


class Finish(NamedTuple):
    """The last round is closed."""


class Abort(NamedTuple):
    """Write down and publish that the run has ended early."""

    reason: str


class Fail(NamedTuple):
    """End the process by an error."""

    error: EdgeNodeError


class Publish(NamedTuple):
    """Publish the round."""


# Nodes


class Admit(NamedTuple):
    """Write down that a node holds a place, and welcome it."""

    node: str
    hello: Hello
    contributed: int


class WelcomeNewcomer(NamedTuple):
    """Welcome a node that takes no place."""

    node: str
    hello: Hello


class Reject(NamedTuple):
    """Do not let a node in."""

    node: str
    refusal: Refusal


class Refuse(NamedTuple):
    """Refuse a node that breaks the protocol."""

    error: PeerError


class Collect(NamedTuple):
    """Validate a contribution, fetch its blob if it has one, and add it; Contributed follows,
    if it is valid.
    """

    node: str
    message: Contribution


class Cancel(NamedTuple):
    """Fetch nothing more from a node."""

    node: str


class Accept(NamedTuple):
    """Tell a node that it need not send a contribution again."""

    node: str
    accepted: Accepted


class RecordFinished(NamedTuple):
    """Write down that a node has its model."""

    node: str


class Forget(NamedTuple):
    """A node is not expected to answer the roll call any more."""

    node: str


class Drop(NamedTuple):
    """Take a node out of the journal; Dropped follows. Then refuse it."""

    node: str
    error: PeerError


# Masks


class RecordMasks(NamedTuple):
    """Write down what a step has come to."""

    facts: Facts
    drawn: Collection[str] = ()  # who takes part in the round from now on, if that has changed


class Say(NamedTuple):
    """Tell a node a step."""

    node: str
    step: MaskingStep


class Unmask(NamedTuple):
    """Take the masks away from the sum of the round; the event Unmasked follows,
    unless more has to be revealed.
    """

    masking: Masking


# People


class ShowRound(NamedTuple):
    """Report that the open round goes on."""

    round: int


class Show(NamedTuple):
    """Report what a node does."""

    node: str
    what: progress.ActivityKind
    round: int


class Report(NamedTuple):
    """Report to people; of equal `once` only the first."""

    event: progress.AnyEvent
    once: tuple[object, ...] = ()


Effect = (
    Open
    | Close
    | Finish
    | Abort
    | Fail
    | Publish
    | Admit
    | WelcomeNewcomer
    | Reject
    | Refuse
    | Collect
    | Cancel
    | Accept
    | RecordFinished
    | Forget
    | Drop
    | RecordMasks
    | Say
    | Unmask
    | ShowRound
    | Show
    | Report
)

# Findings


class Pause(NamedTuple):
    """Fewer nodes are present or have contributed than the quorum:
    the round waits for more to come.
    """

    round: int


class Resume(NamedTuple):
    """Enough nodes are there again."""

    round: int


class Scarce(NamedTuple):
    """Too few nodes have images of these classes for their sums to be read."""

    classes: list[int]


class Unreadable(NamedTuple):
    """Of those who hold shares of these nodes' secrets too few are left:
    the sum of the round cannot be read.
    """

    nodes: list[str]


class Forgotten(NamedTuple):
    """A node of the round has other keys than it had: it has lost its secrets,
    and can do nothing more in it.
    """

    node: str


Finding = Pause | Resume | Scarce | Unreadable | Forgotten
