"""amqtt (MQTT 3.1.1) for machines without mosquitto: `python -m
broker_config.broker.amqtt_broker HOST PORT`.
"""

import asyncio
import logging
import sys
from collections.abc import Iterator
from typing import Any

from amqtt.broker import Broker
from amqtt.plugins.base import BaseAuthPlugin

SESSION_EXPIRY = 24 * 3600  # seconds


class AdmitAll(BaseAuthPlugin):  # type: ignore[misc]
    """Admits everyone. Unlike amqtt's anonymous login it lets sessions outlive their connection."""

    async def authenticate(self, *, session: Any) -> bool:  # noqa: ARG002
        """Admit the client of `session`."""
        return True


class Subscriptions(dict[str, list[Any]]):
    """Subscriptions by topic filter, which may change while they are iterated over.

    amqtt 0.12.1 sends a new client the retained messages of one filter after the other. A filter
    that another client adds meanwhile ends that loop with a RuntimeError: the client stays
    connected, and the broker ignores all it sends.
    """

    def __iter__(self) -> Iterator[str]:
        """Iterate over the filters that are there now."""
        return iter(list(super().keys()))


async def serve(host: str, port: int) -> None:
    """Serve until the process is terminated."""
    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"{host}:{port}"}},
            "plugins": {"broker_config.broker.amqtt_broker.AdmitAll": {}},
            "session_expiry_interval": SESSION_EXPIRY,
        }
    )
    broker._subscriptions = Subscriptions()
    await broker.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
