"""The console as a process of its own."""

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.support.plants import start, wait_for


@contextlib.contextmanager
def console(log: Path, *folders: Path) -> Iterator[str]:
    """The URL of a console of these state folders; it must end in order."""
    process = start("console", *folders, "--port", 0, log=log)
    try:
        told = wait_for(log, "/console/\n")
        found = re.search(r"http://\S+", told)
        assert found
        yield found[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()


def url_in(text: str) -> str:
    """The URL that a coordinator names for its console."""
    found = re.search(r"console: (http://\S+)", text)
    assert found, text
    return found[1]


def is_served(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
