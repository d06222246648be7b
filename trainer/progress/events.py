"""Events of long commands: one vocabulary for all commands,
shown to people and written as JSON for machines.
"""

from collections.abc import Callable
from typing import Any, Literal, TextIO

import msgspec

from broker_config.protocol.messages import Option, Validation
from edge.terminal.formatting import (
    format_bytes,
    format_metrics,
    format_names,
    format_rate,
    format_remaining,
    format_validation,
    pluralize,
)


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Base of all events; `event` in JSON is the class's name."""


class Step(Event, frozen=True, kw_only=True):
    """A step of work outside the rounds has begun.

    Where it takes long, the event is repeated every few seconds with the parts that are done.
    """

    what: str
    done: int = 0  # parts, such as images
    total: int = 0  # 0: unknown


class Note(Event, frozen=True, kw_only=True):
    """A message worth reading."""

    text: str


class Gathering(Event, frozen=True, kw_only=True):
    """A federation waits for its nodes."""

    federation: str
    run: str
    nodes: int
    rounds: int  # 0: unlimited
    settings: dict[str, Option] = {}  # of the run, as its coordinator or a simulation tells them
    what: str = "node"  # they are called


class NodeJoined(Event, frozen=True, kw_only=True):
    """A node has joined, for the first time or again."""

    node: str


class NodeLost(Event, frozen=True, kw_only=True):
    """A node's connection ended before its work was done."""

    node: str
    round: int


class NodeRefused(Event, frozen=True, kw_only=True):
    """A peer broke the protocol and is left out."""

    node: str
    round: int
    reason: str


class Paused(Event, frozen=True, kw_only=True):
    """The open round waits for nodes to come back."""

    round: int
    waiting_for: list[str]


class RoundOpened(Event, frozen=True, kw_only=True):
    """Nodes may train, or sum what they see."""

    round: int


ActivityKind = Literal["waiting", "receiving", "training", "sending", "judging"]


class Activity(Event, frozen=True, kw_only=True):
    """What a node does from now on.

    The coordinator takes a node to be training until it offers its contribution.

    During a transfer the event is repeated, at most once a second, with the bytes transferred so
    far.
    """

    node: str
    round: int
    what: ActivityKind
    done: int = 0  # bytes
    total: int = 0  # bytes; 0 when there is no transfer


class Received(Event, frozen=True, kw_only=True):
    """A node has received the round's broadcast."""

    node: str
    round: int
    bytes: int


class Contribution(Event, frozen=True, kw_only=True):
    """A node's contribution has been added to the sum."""

    node: str
    round: int
    weight: float  # raw, as the node measured it
    bytes: int


class Late(Event, frozen=True, kw_only=True):
    """A node's contribution came after its round was closed, and is not counted."""

    node: str
    round: int


class Measured(Event, frozen=True, kw_only=True):
    """Metrics of a node's round, from the node itself or a simulation,
    or from a coordinator if the node opted in.
    """

    node: str
    round: int
    metrics: dict[str, float]


class RoundClosed(Event, frozen=True, kw_only=True):
    """The contributions are averaged or added up.

    For a node: its part is done, and the next round has begun.
    """

    round: int
    contributors: list[str]
    seconds: float
    missing: list[str] = []  # members that might have contributed
    sums: bool = False  # whether they are statistics, added up
    # How much counts of what the rule has limited, 0..1: node -> "weight", "update" -> share.
    limited: dict[str, dict[str, float]] = {}
    bytes_up: int = 0  # as in FederationFinished, since the previous round was closed
    bytes_down: int = 0


class Learning(Event, frozen=True, kw_only=True):
    """Progress of a node whose rounds are many and short, at most once a second."""

    node: str
    round: int  # the last one that it has learnt from
    rounds: int = 0  # in all; 0: unknown or unlimited
    rate: float  # recent rounds per second
    loss: float | None = None  # of that round; None if the node does not know it
    validation: Validation | None = None  # of the newest products, likewise


class ModelReady(Event, frozen=True, kw_only=True):
    """A node has the model of the federation's first sums; training goes on."""

    node: str
    folder: str
    # on images that it has not seen, each 0 to 1; None where none can judge
    accuracy: float | None = None
    low: float | None = None  # 95 % interval
    high: float | None = None


class FederationFinished(Event, frozen=True, kw_only=True):
    """The last round is closed and every node has its model. A node reports its own bytes."""

    rounds: int
    bytes_up: int  # nodes -> coordinator
    bytes_down: int  # coordinator -> broker, which sends a copy to every node
    seconds: float


class Exported(Event, frozen=True, kw_only=True):
    """A node's bundle has been written, and agrees with torch."""

    node: str
    folder: str
    bytes: int  # of its graph
    difference: float  # maximum over the outputs


class CellFinished(Event, frozen=True, kw_only=True):
    """One cell of an experiment's grid, a simulated federation, is finished."""

    done: int  # cells
    total: int
    cell: str  # its description
    seconds: float
    accuracy: float | None = None  # mean of the nodes
    rmse: float | None = None  # if the classes are numbers
    left: float | None = None  # estimated seconds for the remaining cells


class Result(Event, frozen=True, kw_only=True):
    """Result of the command, always the last event.

    A command that fails has none, but an exit code and a message.
    """

    result: dict[str, Any]


AnyEvent = (
    Step
    | Note
    | Gathering
    | NodeJoined
    | NodeLost
    | NodeRefused
    | Paused
    | RoundOpened
    | Activity
    | Received
    | Contribution
    | Late
    | Measured
    | RoundClosed
    | Learning
    | ModelReady
    | FederationFinished
    | Exported
    | CellFinished
    | Result
)
Report = Callable[[AnyEvent], None]
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def ignore(event: AnyEvent) -> None:
    """Report nothing."""


def json_lines(stream: TextIO) -> Report:
    """Write one JSON object a line, for machines."""

    def report(event: AnyEvent) -> None:
        print(msgspec.json.encode(event).decode(), file=stream, flush=True)

    return report


def parse_event(line: str | bytes) -> AnyEvent:
    """The event in a line that `json_lines` wrote."""
    return _decoder.decode(line)


def format_event(event: AnyEvent) -> str:
    """The event as a sentence."""
    match event:
        case Step(what=text, done=done, total=total) if total:
            return f"{text}: {done} of {total}"
        case Step(what=text) | Note(text=text):
            return text
        case Gathering():
            rounds = (
                pluralize(event.rounds, "round")
                if event.rounds
                else "an unlimited number of rounds"
            )
            return (
                f"federation {event.federation}: waiting for "
                f"{pluralize(event.nodes, event.what)}, {rounds}"
            )
        case NodeJoined():
            return f"{event.node} joined"
        case NodeLost():
            return f"{event.node} is gone (round {event.round}): its connection ended"
        case NodeRefused():
            return f"{event.node} is left out (round {event.round}): {event.reason}"
        case Late():
            return f"round {event.round}: {event.node} contributed too late; it is not counted"
        case Paused():
            return (
                f"round {event.round} waits for "
                f"{format_names(event.waiting_for) or 'more nodes'} to come back"
            )
        case _:
            return _format_progress(event)


def _format_progress(event: AnyEvent) -> str:
    match event:
        case RoundOpened():
            return f"round {event.round} opened"
        case Activity():
            part = (
                f" ({format_bytes(event.done)} of {format_bytes(event.total)})"
                if event.total
                else ""
            )
            return f"round {event.round}: {event.node} is {event.what}{part}"
        case Received():
            return f"round {event.round}: {event.node} received {format_bytes(event.bytes)}"
        case Contribution():
            return (
                f"round {event.round}: {event.node} contributed {format_bytes(event.bytes)}, "
                f"weight {event.weight:.3f}"
            )
        case Measured():
            return f"round {event.round}: {event.node}: {format_metrics(event.metrics)}"
        case RoundClosed():
            without = f" without {format_names(event.missing)}" if event.missing else ""
            return f"round {event.round} closed after {event.seconds:.1f} s{without}"
        case Learning():
            of = f" of {event.rounds}" if event.rounds else ""
            loss = [] if event.loss is None else [f"loss {event.loss:.3f}"]
            rate = [format_rate(event.rate)] if event.rate else []
            judged = f"; {format_validation(event.validation)}" if event.validation else ""
            return f"round {event.round}{of}: {', '.join([*loss, *rate])}{judged}".removesuffix(
                ": "
            )
        case ModelReady():
            return (
                f"a model is ready in {event.folder}, and can be exported and served; training "
                "goes on"
            )
        case FederationFinished():
            up = event.bytes_up
            down = event.bytes_down
            moved = f", {format_bytes(up)} up, {format_bytes(down)} down" if up or down else ""
            return f"finished: {pluralize(event.rounds, 'round')} in {event.seconds:.0f} s{moved}"
        case Exported():
            size = format_bytes(event.bytes)
            return (
                f"wrote {event.folder}: {size}, differs from torch by at most "
                f"{event.difference:.1e}"
            )
        case CellFinished():
            left = (
                ""
                if event.left is None or event.done == event.total
                else f", {format_remaining(event.left)} to go"
            )
            reached = "" if event.accuracy is None else f"accuracy {100 * event.accuracy:.1f} %"
            reached = reached if event.rmse is None else f"RMSE {event.rmse:.2f}"
            return (
                f"{event.done} of {event.total}{left}: {event.cell}: {reached} in "
                f"{event.seconds:.0f} s"
            )
        case Result():
            return ", ".join(event.result)
    raise AssertionError(event)
