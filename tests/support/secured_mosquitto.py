"""A mosquitto with a listener of each kind: closed, TLS, websockets, client certificates."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from broker_config.broker.embedded import find_mosquitto
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.waiting import wait_until


class Secured(NamedTuple):
    """A mosquitto that admits nobody on `closed`,
    and whoever the listener's name says on the others (ports).
    """

    closed: int
    tls: int
    ws: int
    wss: int
    mutual: int  # TLS with client certificates
    authority: Authority


_CONFIGURATION = """
per_listener_settings true
listener {closed} 127.0.0.1
listener {tls} 127.0.0.1
allow_anonymous true
certfile {certificate}
keyfile {key}
listener {ws}
protocol websockets
allow_anonymous true
listener {wss}
protocol websockets
allow_anonymous true
certfile {certificate}
keyfile {key}
listener {mutual} 127.0.0.1
allow_anonymous true
certfile {certificate}
keyfile {key}
cafile {ca}
require_certificate true
"""


@contextlib.contextmanager
def secured_mosquitto(folder: Path) -> Iterator[Secured]:
    authority = Authority(folder, "plant")
    certificate, key = authority.issue("broker")
    folder.chmod(0o755)
    key.chmod(0o644)  # mosquitto reads it as another user when root starts it
    server = Secured(*(free_port() for _ in range(5)), authority)
    config = folder / "mosquitto.conf"
    config.write_text(
        "user root\n"
        + _CONFIGURATION.format(
            **server._asdict(), certificate=certificate, key=key, ca=authority.ca
        )
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [str(find_mosquitto()), "-c", str(config)], stderr=log, stdout=log
        )
    try:
        log_file = folder / "log"
        wait_until(
            lambda: "running" in log_file.read_text(),
            meanwhile=lambda: process.poll() is None,
            said=log_file.read_text,
        )
        yield server
    finally:
        process.terminate()
        process.wait()
