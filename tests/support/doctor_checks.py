"""The doctor's checks against one broker, together or singly,
and brokers configured as a test wants.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker_config.broker.embedded import find_mosquitto
from broker_config.mqtt.endpoint import Endpoint
from broker_config.mqtt.handshake import MQTT5
from edge.doctor.probe import CheckContext, Result
from edge.doctor.run import BROKER, LOCAL, LOOPBACK, REACH, run_checks
from tests.support.ports import free_port
from tests.support.waiting import wait_until

EVERY = [find.__name__ for find in (*REACH, *BROKER, *LOOPBACK, *LOCAL)]


def diagnose(
    endpoint: Endpoint | str, name: str = "plant-a", *, timeout: float = 10
) -> dict[str, Result]:
    """Every check by its name."""
    if isinstance(endpoint, str):
        endpoint = Endpoint.parse(endpoint)
    with CheckContext(endpoint, name, Path(), timeout) as context:
        return {check.name: check for check in run_checks(context)}


@contextmanager
def tried(
    endpoint: Endpoint | str, name: str = "plant-a", **known: object
) -> Iterator[CheckContext]:
    """A context for single checks, with MQTT 5."""
    if isinstance(endpoint, str):
        endpoint = Endpoint.parse(endpoint)
    with CheckContext(
        endpoint, name, Path(), **{"timeout": 10, "version": MQTT5, **known}
    ) as context:  # type: ignore[arg-type]
        yield context


@contextmanager
def configured(folder: Path, *lines: str) -> Iterator[int]:
    """The port of a mosquitto that admits everybody, with these lines in its configuration,
    or as they say.
    """
    port = free_port()
    folder.mkdir(exist_ok=True)
    (folder / "conf").write_text(
        "\n".join(["user root", f"listener {port} 127.0.0.1", "allow_anonymous true", *lines])
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [str(find_mosquitto()), "-c", str(folder / "conf")], stderr=log, stdout=log
        )
    try:
        log_file = folder / "log"
        wait_until(
            lambda: "running" in log_file.read_text(),
            meanwhile=lambda: process.poll() is None,
            said=log_file.read_text,
        )
        yield port
    finally:
        process.terminate()
        process.wait(60)
