"""Presence of a federation's server and members: who is connected under which name;
and patience with the broker.
"""

import time
from collections.abc import Callable
from pathlib import Path

from broker_config.mqtt.client import Claim, Endpoint, is_name_taken, read_retained
from broker_config.mqtt.collision import decode_presence
from broker_config.protocol import topics
from broker_config.protocol.errors import BrokerAwayError, BrokerError, BrokerFullError, UsageError
from broker_config.storage.disk import check_writable
from trainer import progress

_PAUSE = 1.0  # seconds between two attempts
AWAY = 60.0  # seconds in which a broker that is started together with us comes up


def is_connected(endpoint: Endpoint, federation: str, name: str) -> bool:
    """Whether somebody is connected under this name, as the broker retains it.

    BrokerError if there is no broker.
    """
    topic = topics.presence(federation, name)
    presence = decode_presence(read_retained(endpoint, [topic], wait=1.0).get(topic, b""))
    return presence is not None and presence.online


def check_no_server(endpoint: Endpoint, federation: str) -> None:
    """Raise UsageError if a server is connected;
    it may run from a copy of our state folder.
    """
    if is_name_taken(endpoint, Claim.draw(topics.presence(federation, topics.COORDINATOR))):
        raise another_server(endpoint, federation)


def check_name_free(
    endpoint: Endpoint, federation: str, name: str, state: Path, option: str = "--name"
) -> None:
    """Raise UsageError if another node of this name is connected, or uses our state folder,
    or a copy of it; `option` gives the name.
    """
    check_writable(state)
    if is_name_taken(endpoint, Claim.draw(topics.presence(federation, name))):
        raise UsageError(
            f"the name {name!r} is taken: a node of that name is connected to federation "
            f"{federation!r}",
            "stop that one (it may run from a copy of this state folder), or "
            f"{take_another_name(endpoint, option)}",
        )


def take_another_name(endpoint: Endpoint, option: str = "--name") -> str:
    """The remedy for a node whose name is another's, too:
    with a kit the name stands in its certificate.
    """
    if endpoint.kit is None:
        return f"choose another {option}"
    return (
        f"take a kit of another name, which edge-node provision {endpoint.kit.federation} "
        "--nodes NAME makes"
    )


class Patience:
    """What can be borne of a broker: that it is away, for `wait` seconds on end,
    or has no room, for ever.

    Whoever takes all connections must not end those who need one: it is the broker's operator who
    can do something.
    """

    def __init__(self, notify: Callable[[str], None], wait: float = AWAY, pause: float = _PAUSE):
        self._notify = notify
        self._wait = wait
        self._pause = pause
        self._since: float | None = None  # when it was found away

    def bear(self, error: BrokerError) -> None:
        """Say once what is awaited, and pause; raise `error` if waiting does not help."""
        now = time.monotonic()
        notify_once = self._notify if self._since is None else lambda _: None
        self._since = now if self._since is None else self._since
        match error:
            case BrokerFullError():
                notify_once(f"{error.what}; waiting for room: {error.remedy}")
            case BrokerAwayError() if now < self._since + self._wait:
                notify_once(f"{error.what}; trying again for {self._wait:.0f} s: {error.remedy}")
            case _:
                raise error
        time.sleep(self._pause)

    def renew(self) -> None:
        """The broker has answered."""
        self._since = None


def await_broker(
    connect: Callable[[], object], report: progress.Report, stop: Callable[[], bool]
) -> bool:
    """Connect; while the broker is away or has no room, say so and try again.

    False if `stop` ended that.
    """
    patience = Patience(lambda text: report(progress.Note(text=text)))
    while not stop():
        try:
            connect()
        except BrokerError as error:
            patience.bear(error)
        else:
            return True
    return False


def another_server(endpoint: Endpoint, federation: str) -> UsageError:
    """The error for a second server of one federation."""
    elsewhere = (
        "choose another name with --federation"
        if endpoint.kit is None
        else "take another federation's kit"
    )
    return UsageError(
        f"federation {federation!r} already has a coordinator on {endpoint}",
        f"stop that one (it may run from a copy of this state folder), or {elsewhere}",
    )
