"""Two processes under one MQTT client id: the claims by which they notice,
and what gives them away without one.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple, Self

from broker_config.protocol.codec import DecodeError, decode, encode
from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Presence

# why a connection has ended (MQTT 5): another one has come under its client id
TAKEN_OVER = "Session taken over"
_SHORT = 3.0  # seconds
_REPEATED = 4  # connections as short as that, one after the other


class Claim(NamedTuple):
    """One process's claim to a name: the presence that it publishes,
    under a session that no copy of it can have.
    """

    topic: str
    session: str  # random, of this process
    identity: str = ""

    @classmethod
    def draw(cls, topic: str) -> Self:
        """The claim of a process that only asks whether the name is free."""
        return cls(topic, secrets.token_hex(8))

    def encode(self, *, online: bool = True, asking: bool = False) -> bytes:
        """The claim as it is published."""
        return encode(
            Presence(session=self.session, online=online, identity=self.identity, asking=asking)
        )

    def judge(self, payload: bytes) -> Literal["own", "question", "rival", "void"]:
        """What a presence under this name means to us.

        A rival is connected, and its claim comes first. Void is what others left behind, or claim
        after us.
        """
        said = decode_presence(payload)
        if said is None:
            return "void"
        if said.session == self.session:
            return "void" if said.asking else "own"
        if said.asking:
            return "question"
        return "rival" if said.online and said.session < self.session else "void"


def decode_presence(payload: bytes) -> Presence | None:
    """The presence in a retained message; None for what cannot be read, which is nobody's:
    ours will replace it.
    """
    with suppress(DecodeError):
        return decode(payload, Presence)
    return None


def another_process(name: str, remedy: str = "stop one of them") -> EdgeNodeError:
    """The error for a process whose place another one has taken."""
    return EdgeNodeError(f"another process has connected as {name}", remedy)


class CollisionDetector:
    """Recognises from a client's connections that another process takes them away,
    where there is no claim to ask for.

    MQTT 5 has the broker say so as it closes the connection. mosquitto 2.0.11 does not: there, each
    connection breaks again soon after it was made.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._connected_at = 0.0
        self._short = 0

    def begin(self) -> None:
        """A connection was made."""
        self._connected_at = self._clock()

    def end(self, reason: str) -> bool:
        """The connection has ended; whether that shows that another process has connected under
        our client id.
        """
        self._short = self._short + 1 if self._clock() - self._connected_at < _SHORT else 0
        return reason == TAKEN_OVER or self._short == _REPEATED
