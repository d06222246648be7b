"""Further kinds of federation, which installed packages bring.

A kind shares the kernel's rules: names, spec, presence, `up` and `down`, signatures. It has its own
spec and overview, and may have more messages and topics. A package registers it under the name of
its topics' level:

    [project.entry-points."edge_node.federations"]
    name = "package.module:KIND"

Entry points are looked up when the first message is decoded, or the first right is asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import AnyMessage, CommonSpec, Message
from broker_config.registry import Registry

NODE = "+"  # stands for a node's name in the path of a topic


class KindTopic(NamedTuple):
    """A topic that only federations of one kind use, with who may write and who may read it.

    `+` in its path stands for a node's name: a node may use that of its own name. What nodes write
    must have one, since everything has one signer.
    """

    path: str  # below `edge-node/v1/FEDERATION/KIND/`
    writer: Literal["coordinator", "node"]
    readers: tuple[Literal["coordinator", "monitor", "node"], ...]


class StatusText(NamedTuple):
    """A federation's status in words, as `edge-node status` prints it."""

    title: str
    lines: Sequence[str]
    notices: Sequence[str]  # deserve attention
    titles: Sequence[str]  # of the table's columns; `state` may be the first
    rows: Mapping[str, Mapping[str, str]]  # member -> title -> cell
    remarks: Sequence[str]  # deserve attention, below the table


class FederationKind(NamedTuple):
    """A kind of federation: its messages, its topics, and what other commands say of it.

    Its module must load fast: it may import neither torch nor what does.

    Attributes:
        spec: what its coordinator retains on `spec`.
        overview: what its coordinator retains on `status`.
        others: its other messages.
        topics: its own topics.
        summary: says in a few words what a spec announces, for `edge-node doctor`.
        status: says how a federation is doing. It takes the federation's name, its overview, and
            whether its coordinator is connected.
        has_ended: whether an overview says that nothing more will happen.
        first_step: how a coordinator of the kind is started, for whoever has provisioned a
            federation.
    """

    spec: type[CommonSpec]
    overview: type[Message]
    others: tuple[type[Message], ...]
    topics: tuple[KindTopic, ...]
    summary: Callable[[Any], str]
    status: Callable[[str, Any, bool], StatusText]
    has_ended: Callable[[Any], bool]
    first_step: str


KINDS: Registry[FederationKind] = Registry("federations", needed=False)


@cache
def kinds_by_message() -> Mapping[type[Message], str]:
    """The messages that registered kinds bring, each with the name of its kind.

    Raises:
        UsageError: two packages bring messages of one name.
    """
    found: dict[type[Message], str] = {}
    taken = {each.__name__: "edge-node" for each in get_args(AnyMessage)}
    for name, kind in KINDS.items():
        for message in (kind.spec, kind.overview, *kind.others):
            other = taken.setdefault(message.__name__, name)
            if other != name:
                raise UsageError(
                    f"{message.__name__} is a message both of {other} and of the federations "
                    f"{name!r}",
                    "uninstall the package that brings the second one",
                )
            found[message] = name
    return found


def kind_of(message: Message) -> str:
    """Return the name of the kind that the message belongs to; empty if it is the kernel's."""
    return kinds_by_message().get(type(message), "")


def kind_of_topic(topic: str) -> str:
    """Return the name of the kind that alone uses this topic; empty if there is none."""
    levels = topic.split("/")
    if len(levels) > 4 and levels[3] in KINDS:
        return levels[3]
    return ""


def writer_of(topic: str) -> str | None:
    """Return the member that alone may publish on a kind's topic; None if no kind has it."""
    kind = kind_of_topic(topic)
    if not kind:
        return None
    levels = topic.split("/")[4:]
    for each in KINDS[kind].topics:
        path = each.path.split("/")
        if _matches(path, levels):
            return each.writer if each.writer == "coordinator" else levels[path.index(NODE)]
    return None


def _matches(path: Sequence[str], levels: Sequence[str]) -> bool:
    if len(path) != len(levels):
        return False
    return all(expected in (NODE, found) for expected, found in zip(path, levels, strict=True))
