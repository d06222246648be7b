"""Ports for servers that are told where to listen."""

import random
import socket
from collections.abc import Iterator
from contextlib import suppress

HOST = "127.0.0.1"


def free_port() -> int:
    """A free port below those that connections are given, each once:
    nobody takes it while its server does not run.
    """
    for port in _PORTS:
        with suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise AssertionError("no port is free")


def _own_ports() -> Iterator[int]:
    """Ports of hundreds that no other process of these tests has:
    it keeps the UDP port of each one's first.
    """
    kept = []
    for first in random.SystemRandom().sample(range(20_000, 32_000, 100), 120):
        with suppress(OSError):
            kept.append(socket.socket(type=socket.SOCK_DGRAM))
            kept[-1].bind((HOST, first))
            yield from range(first, first + 100)


_PORTS = _own_ports()


def accepts_connections(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with socket.socket() as trial:
        return trial.connect_ex((HOST, port)) == 0
