"""Topic names, as functions.

The protocol's version is in the root, so versions never meet by accident.
"""

import re

from broker_config.protocol.errors import UsageError
from broker_config.protocol.federation_kinds import writer_of

ROOT = "edge-node/v1"
COORDINATOR = "coordinator"
MONITOR = "monitor"  # reads along and takes no part
TRIAL = "doctor"  # the federation in which a broker is tried out
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def is_name(name: str) -> bool:
    """Whether `name` may be a node's or a federation's."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, what: str) -> str:
    """Return `name` if it may stand in a topic, else raise UsageError."""
    if not is_name(name):
        raise UsageError(
            f"{what} {name!r} cannot be used",
            "take up to 64 letters, digits, '.', '_' or '-', a letter or digit first",
        )
    return name


def check_node(name: str) -> str:
    """Return `name` if a node may have it, else raise UsageError."""
    if name in (COORDINATOR, MONITOR):
        raise UsageError(
            f"a node cannot be named {name!r}", "take a node's kit (--kit), or choose another name"
        )
    return check_name(name, "the node's name")


def check_federation(name: str) -> str:
    """Return `name` if a federation may have it, else raise UsageError."""
    if name == TRIAL:
        raise UsageError(
            f"a federation cannot be named {name!r}: edge-node doctor uses that",
            "choose another name",
        )
    return check_name(name, "the federation's name")


def any_version(topic: str) -> str:
    """A filter for this topic in every version of the protocol."""
    return topic.replace(ROOT, "edge-node/+", 1)


def spec(federation: str) -> str:
    """Coordinator -> all, retained: what the federation is. `+` for any federation."""
    return f"{ROOT}/{federation}/spec"


def round_state(federation: str) -> str:
    """Coordinator -> all, retained: which round is open and what was broadcast."""
    return f"{ROOT}/{federation}/round"


def presence(federation: str, node: str) -> str:
    """Node -> all, retained and last will: whether the node is there. `+` for any node."""
    return f"{ROOT}/{federation}/nodes/{node}/presence"


def up(federation: str, node: str) -> str:
    """Node -> coordinator. `+` for any node."""
    return f"{ROOT}/{federation}/nodes/{node}/up"


def down(federation: str, node: str) -> str:
    """Coordinator -> node."""
    return f"{ROOT}/{federation}/nodes/{node}/down"


def want(federation: str, holder: str, asker: str) -> str:
    """Asker -> holder of a blob: which chunks are missing. `+` for any asker."""
    return f"{ROOT}/{federation}/blobs/{holder}/want/{asker}"


def chunks(federation: str, holder: str, digest: str, chunk_size: int | str) -> str:
    """Holder -> whoever fetches this blob at the moment: its chunks of this size."""
    return f"{ROOT}/{federation}/blobs/{holder}/chunks/{digest}/{chunk_size}"


def status(federation: str) -> str:
    """Coordinator -> whoever watches, retained: how the federation is doing.

    `+` for any federation.
    """
    return f"{ROOT}/{federation}/status"


def verdicts(line: str) -> str:
    """Line daemon -> whoever watches the line, the last one retained:
    one JSON object for each outcome.
    """
    return f"{ROOT}/lines/{line}/verdicts"


def expected_signer(topic: str) -> str | None:
    """The one member that may publish on a topic; None for chunks and requests for them,
    which nobody signs.
    """
    match topic.split("/")[3:]:
        case ["spec" | "round" | "status"] | ["nodes", _, "down"]:
            return COORDINATOR
        case ["nodes", node, "presence" | "up"]:
            return node
    return writer_of(topic)


def sender(topic: str) -> str:
    """The node that publishes on an `up`, `presence` or `want` topic."""
    parts = topic.split("/")
    return parts[-1] if len(parts) > 6 else parts[4]


def blob(topic: str) -> str:
    """The digest of the blob that is sent on a `chunks` topic."""
    return topic.split("/")[-2]


def replace_blob(topic: str, digest: str) -> str:
    """A `chunks` topic with another digest."""
    *parts, _, chunk_size = topic.split("/")
    return "/".join((*parts, digest, chunk_size))


def private_to(topic: str) -> str | None:
    """The node that alone talks with the coordinator on this topic of messages or blobs;
    None where all read along.
    """
    match topic.split("/")[3:]:
        case ["nodes", node, "up" | "down"]:
            return node
        case ["blobs", holder, *_] if holder != COORDINATOR:
            return holder
        case ["blobs", _, "want", asker]:
            return asker
    return None


def is_chunks(topic: str) -> bool:
    """Whether chunks of a federation's blob travel on this topic."""
    parts = topic.split("/")
    return len(parts) == 8 and (parts[3], parts[5]) == ("blobs", "chunks")


def is_want(topic: str) -> bool:
    """Whether chunks of a federation's blob are requested on this topic."""
    parts = topic.split("/")
    return len(parts) == 7 and (parts[3], parts[5]) == ("blobs", "want")


def federation_of(topic: str) -> str:
    """The federation that a topic belongs to."""
    return topic.split("/")[2]
