"""Ports for servers that are told where to listen."""

import random
import socket
from contextlib import suppress

HOST = "127.0.0.1"


def free_port() -> int:
    """A free port below those that connections are given: nobody takes it while its server does not run."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise AssertionError("no port is free")


def accepts_connections(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with socket.socket() as trial:
        return trial.connect_ex((HOST, port)) == 0
