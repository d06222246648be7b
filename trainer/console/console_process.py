"""Console beside a coordinator: a process of its own,
which ends with that and never the other way round.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker_config.protocol.errors import UsageError
from broker_config.security.secret_environment import environment_without_secrets
from trainer.progress import Note, Report

LOG = "console.log"  # in the state folder
PATH = "/console/"
_PATIENCE = 5.0  # seconds for it to end


@contextmanager
def console_beside(state: Path, address: str | None, report: Report) -> Iterator[None]:
    """A console at [HOST:]PORT, if one is wanted, of a state folder that has a journal;
    port 0 takes a free one.

    Raises:
        UsageError: that is no address.
        EdgeNodeError: the port is taken.
    """
    if address is None:
        yield
        return
    from edge.http.server import listen  # noqa: PLC0415  (few want a page)

    wanted, port = _parse_address(address)
    with listen(wanted, port) as listener, (state / LOG).open("ab") as log:
        host, port = listener.getsockname()[:2]
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "trainer.console.console",
                str(state),
                wanted,
                str(listener.fileno()),
            ],
            pass_fds=(listener.fileno(),),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment_without_secrets(),
            start_new_session=True,  # Ctrl-C is for the coordinator
        )
    host_text = f"[{host}]" if ":" in host else host
    report(Note(text=f"console: http://{host_text}:{port}{PATH}"))
    try:
        yield
    finally:
        try:
            process.communicate(timeout=_PATIENCE)  # closes its standard input
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _parse_address(given: str) -> tuple[str, int]:
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"--http {given!r} is not [HOST:]PORT",
            "write for example --http 8090, or --http 0.0.0.0:8090",
        )
    return host.strip("[]") or "127.0.0.1", int(port)
