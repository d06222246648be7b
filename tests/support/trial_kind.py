"""A kind of federation that nobody has installed, registered for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from broker_config.protocol import codec
from broker_config.protocol.federation_kinds import (
    KINDS,
    FederationKind,
    KindTopic,
    StatusText,
    kinds_by_message,
)
from broker_config.protocol.messages import CommonSpec, Message

NAME = "trial"


class TrialSpec(CommonSpec, frozen=True, kw_only=True):
    parties: int


class TrialOverview(Message, frozen=True, kw_only=True):
    says: str = "at work"
    done: bool = False


class TrialCall(Message, frozen=True, kw_only=True):
    text: str


def status(name: str, overview: TrialOverview, online: bool) -> StatusText:
    return StatusText(
        title=f"trial {name}",
        lines=(overview.says,),
        notices=() if online else ("nobody is there",),
        titles=("state", "pulse"),
        rows={"press": {"state": "absent", "pulse": "72"}},
        remarks=("press is missed",),
    )


KIND = FederationKind(
    spec=TrialSpec,
    overview=TrialOverview,
    others=(TrialCall,),
    topics=(
        KindTopic("call", "coordinator", ("node",)),
        KindTopic("result", "coordinator", ("coordinator", "monitor", "node")),
        KindTopic("+/answer", "node", ("coordinator",)),
        KindTopic("+/secret", "coordinator", ("node",)),
    ),
    summary=lambda spec: f"{spec.parties} parties",
    status=status,
    has_ended=lambda overview: overview.done,
    first_step="edge-node trial begin",
)


@contextmanager
def registered(name: str = NAME, kind: FederationKind = KIND) -> Iterator[None]:
    """Have the kind registered while the block runs."""
    KINDS[name] = kind
    forget_messages()
    try:
        yield
    finally:
        del KINDS[name]
        forget_messages()


def forget_messages() -> None:
    """Have the registry looked at again."""
    kinds_by_message.cache_clear()
    codec._decoder.cache_clear()
