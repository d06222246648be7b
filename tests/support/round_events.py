"""Events of a federation's rounds, with what the rounds do not look at made up."""

from broker_config.protocol.messages import Contribution, Hello
from tests.support.wire_messages import RUN, SESSION
from trainer.federation.server.coordinator.events import Acted, Contributed, Joined
from trainer.federation.server.operator_actions import make_action

_HELLO = Hello(session=SESSION, run=RUN, software="1")
_CONTRIBUTION = Contribution(session=SESSION, run=RUN, round=1, weight=1.0, blob=None)


def joined(node: str) -> Joined:
    return Joined(node, _HELLO)


def contributed(node: str) -> Contributed:
    return Contributed(node, _CONTRIBUTION)


def held(is_held: bool) -> Acted:
    """The operator lets no round open or close, or lets the rounds go on."""
    return Acted(make_action(RUN, "pause" if is_held else "resume", "anna"))
