"""Telling a service manager how we are: sd_notify(3), as systemd and others understand it."""

import os
import socket
import time
from collections.abc import Mapping


class Manager:
    """The service manager that started this process, if one did; what it is told when there is none is lost.

    `environment` names its socket (NOTIFY_SOCKET: a path, or "@" and an abstract name) and its watchdog.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog = _watchdog(environment)  # seconds within which it wants to hear of us; None: never

    def tell(self, **states: str | int) -> None:
        """Send variables, e.g. READY=1; nobody waits for an answer, and a manager that is gone is none."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in states.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)  # a manager that does not read must not stop the line
                out.sendto(text.encode(), self._address)
        except OSError:
            return

    def reloading(self) -> None:
        """Say that settings are read again; READY=1 ends that."""
        self.tell(RELOADING=1, MONOTONIC_USEC=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)


def _watchdog(environment: Mapping[str, str]) -> float | None:
    microseconds = environment.get("WATCHDOG_USEC", "")
    mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) and mine else None
