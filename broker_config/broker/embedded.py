"""Broker that needs no configuration: mosquitto where it is installed,
else the pure-Python amqtt.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from queue import Queue
from string import Template
from typing import Literal, Self

from broker_config.mqtt.client import MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import BrokerError, EdgeNodeError
from broker_config.security.secret_environment import environment_without_secrets

START_TIMEOUT = 20.0  # seconds; amqtt needs two to import
STOP_TIMEOUT = 5.0  # seconds
_PORTS_TRIED = 2  # before the error of a third attempt is shown
MAX_PACKET = 268_435_455  # bytes: what MQTT allows
Kind = Literal["mosquitto", "amqtt"]


class EmbeddedBroker:
    """A running broker: `url`, `kind`, `port` and its supervisor's `process`.

    Leaving the context stops it.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], kind: Kind, host: str, port: int, log: Path
    ):
        self.process = process
        self.kind = kind
        self.port = port
        self.url = f"mqtt://{host}:{port}"
        self._log = log

    def wait_ready(self) -> None:
        """Return once it accepts connections; EdgeNodeError with the end of its log if it does
        not.
        """
        endpoint = Endpoint.parse(self.url)
        deadline = time.monotonic() + START_TIMEOUT
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                MqttClient(endpoint, "", inbox=Queue(), persistent=False).open(timeout=1).close()
            except BrokerError:
                time.sleep(0.02)
            else:
                time.sleep(0.05)
                if self.process.poll() is None:  # else another broker answered at this port
                    return
        self.stop()
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        raise EdgeNodeError(
            f"the {self.kind} broker did not start at {self.url}:\n  " + "\n  ".join(lines[-5:]),
            f"the whole log is {self._log}",
        )

    def stop(self) -> None:
        """Stop the broker and wait for its end."""
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_broker(
    folder: Path,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    kind: Literal["auto", "mosquitto", "amqtt"] = "auto",
    max_packet: int | None = None,
) -> EmbeddedBroker:
    """Start a broker that admits everyone and keeps its log in `folder`; `port` 0 takes a free one.

    `max_packet` (bytes) is for mosquitto only. EdgeNodeError if no broker is installed or it does
    not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = _available(kind)
    count = _PORTS_TRIED if port == 0 else 0
    for _ in range(count):
        with suppress(EdgeNodeError):  # another process took the port, which was free a moment ago
            return _start(folder, _usable_port(host, 0), host, found, max_packet)
    return _start(folder, _usable_port(host, port), host, found, max_packet)


def _start(
    folder: Path, port: int, host: str, kind: Kind, max_packet: int | None
) -> EmbeddedBroker:
    log = folder / "broker.log"
    if kind == "mosquitto":
        config = folder / "mosquitto.conf"
        template = Template((Path(__file__).parent / "mosquitto" / "embedded.conf").read_text())
        config.write_text(
            template.substitute(host=host, port=port, max_packet=max_packet or MAX_PACKET, log=log)
        )
        command = [str(find_mosquitto()), "-c", str(config)]
    else:
        command = [sys.executable, "-P", "-m", "broker_config.broker.amqtt_broker", host, str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "broker_config.broker.supervisor", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment_without_secrets(),
            start_new_session=True,  # Ctrl-C is for the parent, which then stops us
        )
    broker = EmbeddedBroker(process, kind, host, port, log)
    broker.wait_ready()
    return broker


def _available(kind: Literal["auto", "mosquitto", "amqtt"]) -> Kind:
    if kind != "amqtt" and find_mosquitto():
        return "mosquitto"
    if kind == "mosquitto":
        raise EdgeNodeError(
            "mosquitto is not installed", "install it (Debian, Ubuntu: apt install mosquitto)"
        )
    if importlib.util.find_spec("amqtt"):
        return "amqtt"
    raise EdgeNodeError(
        "no broker is installed",
        "install mosquitto (apt install mosquitto) or amqtt (pip install 'edge-node[train]')",
    )


def find_mosquitto() -> str | None:
    """Return the path of mosquitto; Debian puts it where only root's PATH leads."""
    return shutil.which(
        "mosquitto",
        path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin")),
    )


def address_for_others(host: str) -> str | None:
    """Return an address of this machine for a broker that listens on all of them,
    None for one that does not.
    """
    if host not in ("0.0.0.0", "::"):  # noqa: S104  (compared, not bound)
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            # nothing is sent: this only selects the interface that packets would take
            trial.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        address: str = trial.getsockname()[0]
    return address


def _usable_port(host: str, port: int) -> int:
    """Return `port`, or a free one for 0; EdgeNodeError if it is taken."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise EdgeNodeError(
                f"a broker cannot listen at {host}:{port}: {error.strerror}",
                "choose another port, or 0 for a free one",
            ) from None
        usable: int = trial.getsockname()[1]
    return usable
