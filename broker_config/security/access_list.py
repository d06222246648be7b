"""Access rights on topics: the table from which a broker's access list is made,
and by which a broker is examined.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from broker_config.protocol import topics
from broker_config.protocol.federation_kinds import KINDS, NODE, KindTopic

_USER = "%u"  # where mosquitto puts the user's name


class Rights(NamedTuple):
    """Topic filters. `denied` takes precedence over the others."""

    writes: tuple[str, ...]
    reads: tuple[str, ...]
    denied: tuple[str, ...] = ()


_NOTHING = Rights((), ())


def rights(name: str, federation: str) -> Rights:
    """The rights that `coordinator`, `monitor` or else a node needs in a federation (`+`: in any),
    of whichever kind.
    """
    match name:
        case topics.COORDINATOR:
            return _coordinator(federation)
        case topics.MONITOR:
            return _monitor(federation)
    return _node(name, federation)


def _coordinator(federation: str) -> Rights:
    me = topics.COORDINATOR
    return Rights(
        writes=(
            topics.spec(federation),
            topics.round_state(federation),
            topics.status(federation),
            topics.down(federation, "+"),
            topics.presence(federation, me),
            topics.want(federation, "+", me),
            topics.chunks(federation, me, "+", "+"),
            *_kind_topics(federation, NODE, lambda each: each.writer == "coordinator"),
        ),
        reads=(
            topics.any_version(topics.spec(federation)),
            topics.round_state(federation),
            topics.status(federation),
            topics.up(federation, "+"),
            topics.presence(federation, "+"),
            topics.want(federation, me, "+"),
            topics.chunks(federation, "+", "+", "+"),
            *_kind_topics(federation, NODE, lambda each: "coordinator" in each.readers),
        ),
    )


def _monitor(federation: str) -> Rights:
    me = topics.MONITOR
    return Rights(
        writes=(),
        reads=(
            topics.any_version(topics.spec(federation)),
            topics.round_state(federation),
            topics.status(federation),
            topics.presence(federation, topics.COORDINATOR),
            *_kind_topics(federation, NODE, lambda each: "monitor" in each.readers),
        ),
        denied=(  # what a node of this name would have
            *_kind_topics(federation, me, lambda each: NODE in each.path),
            *_kind_topics(federation, me, _is_for_all_nodes),
            topics.up(federation, me),
            topics.down(federation, me),
            topics.presence(federation, me),
            topics.want(federation, "+", "+"),
            topics.chunks(federation, "+", "+", "+"),
        ),
    )


def _node(me: str, federation: str) -> Rights:
    return Rights(
        writes=(
            topics.up(federation, me),
            topics.presence(federation, me),
            topics.want(federation, topics.COORDINATOR, me),
            topics.chunks(federation, me, "+", "+"),
            *_kind_topics(federation, me, lambda each: each.writer == "node"),
        ),
        reads=(
            topics.any_version(topics.spec(federation)),
            topics.round_state(federation),
            *_kind_topics(federation, me, lambda each: "node" in each.readers),
            topics.down(federation, me),
            topics.presence(federation, me),
            topics.presence(federation, topics.COORDINATOR),
            topics.want(federation, me, "+"),
            topics.chunks(federation, topics.COORDINATOR, "+", "+"),
        ),
    )


def _kind_topics(federation: str, me: str, concerns: Callable[[KindTopic], bool]) -> Iterator[str]:
    """Topics of all further kinds of federation that concern a member of the name `me`."""
    for name, kind in KINDS.items():
        for each in filter(concerns, kind.topics):
            path = each.path.replace(NODE, me)
            yield f"{topics.ROOT}/{federation}/{name}/{path}"


def _is_for_all_nodes(topic: KindTopic) -> bool:
    """Whether all nodes read it, and the monitor does not."""
    return NODE not in topic.path and "node" in topic.readers and "monitor" not in topic.readers


def acl(federation: str, revoked: Iterable[str] = ()) -> str:
    """Mosquitto's access list (`acl_file`) for a federation,
    and for that in which `edge-node doctor` tries things out.

    Users have the names of their nodes. Patterns hold for every user, and users' own lines add what
    they have besides. Who is `revoked` may read and write nothing, whichever certificate he shows.
    """
    federations = [federation] if federation == "+" else [federation, topics.TRIAL]
    sections = []
    for name in (topics.COORDINATOR, topics.MONITOR):
        lines = list(
            chain.from_iterable(
                _lines(rights(name, each), _node(name, each)) for each in federations
            )
        )
        sections.append([f"user {name}", *(f"topic {line}" for line in lines)])
    sections += [[f"user {name}", "topic deny #"] for name in revoked]
    line_texts = []
    for each in federations:
        for line in _lines(_node(_USER, each)):
            line_texts.append(f"pattern {line}")
    sections.append(line_texts)
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _lines(given: Rights, everybody: Rights = _NOTHING) -> Iterator[str]:
    writes = [topic for topic in given.writes if topic not in everybody.writes]
    reads = [topic for topic in given.reads if topic not in everybody.reads]
    for topic in dict.fromkeys([*writes, *reads]):
        yield f"{'read' * (topic in reads)}{'write' * (topic in writes)} {topic}"
    for topic in given.denied:
        yield f"deny {topic}"
