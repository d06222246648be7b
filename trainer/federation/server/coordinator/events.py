"""Events of a coordinator: what its machines are told, by one name each.

The coordinator's machine gets them from the process, and hands on those that concern the rounds:
`RoundEvent` says which these are.
"""

from collections.abc import Collection
from typing import NamedTuple

from broker_config.protocol.messages import (
    Contribution,
    Finished,
    Hello,
    MaskingAnswer,
    Telemetry,
)
from trainer.federation.server.coordinator.round_state import Federation
from trainer.federation.server.operator_actions import Action


class Started(NamedTuple):
    """The coordinator is connected, with the state that its ledger holds."""

    damaged: Collection[str] = ()  # nodes whose contribution to the open round was not what it was


class Tick(NamedTuple):
    """Time passes."""

    now: float
    finished: Collection[str] = ()  # nodes that have their model
    heard: Collection[str] = ()  # nodes that this process has heard of


class Joined(NamedTuple):
    """A node is there, for the first time or again, and may take part."""

    node: str
    hello: Hello
    session: str | None = None  # that spoke for the node so far
    contributed: int = 0  # the newest round that a contribution of it is recorded to
    is_in_totals: bool = False  # the run's totals hold its statistics


class Left(NamedTuple):
    """A node's connection has ended."""

    node: str
    has_model: bool = False


class Refused(NamedTuple):
    """A node has broken the protocol, and was refused."""

    node: str


class Told(NamedTuple):
    """A node's message of its session and of this run."""

    node: str
    message: Contribution | Telemetry | Finished | MaskingAnswer
    was_counted: bool = False  # a round holds this contribution


class Contributed(NamedTuple):
    """A node's contribution to the open round is valid, written down and summed."""

    node: str
    message: Contribution


class Acted(NamedTuple):
    """The operator wants something that changes how the run goes on."""

    action: Action


class Dropped(NamedTuple):
    """A member is none any more: the answer to the effect `Drop`."""

    node: str
    left: Federation  # what the journal holds without it


class Narrowed(NamedTuple):
    """Only these nodes take part in the open round: the masks of no others are known."""

    nodes: frozenset[str]


class Unmasked(NamedTuple):
    """No mask is left in the round's sum: the answer to the effect `Unmask`."""

    round: int


class Opened(NamedTuple):
    """The round is written down and published: the answer to the effect `Open`."""

    now: float


class Expired(NamedTuple):
    """The round's deadline is over."""

    round: int


RoundEvent = (
    Started
    | Joined
    | Left
    | Refused
    | Contributed
    | Acted
    | Dropped
    | Narrowed
    | Unmasked
    | Expired
)
Event = RoundEvent | Tick | Told | Opened
