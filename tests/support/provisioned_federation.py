"""Federations with keys: provisioned as an operator does it,
with a real mosquitto that admits only their members.
"""

import os
import random
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

from broker_config.broker.embedded import find_mosquitto
from broker_config.mqtt.client import Connected, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.security.kit import Kit
from broker_config.security.member_registry import ChangeRequest, MemberRegistry
from broker_config.security.provisioning import kits, provision
from tests.support.ports import HOST, free_port
from tests.support.waiting import wait_until


class Members(NamedTuple):
    """A federation's folder, and what its members' kits hold."""

    folder: Path
    registry: MemberRegistry
    kits: dict[str, Kit]

    def passphrase(self, name: str) -> str:
        return self.registry.members[name].passphrase

    def change(self, ago: timedelta = timedelta(), **request: Any) -> "Members":
        """What a further run of provision makes of it; with the clock set back by `ago`."""
        return _provision(self.folder, self.registry.federation, ChangeRequest(**request), ago)


def make(
    folder: Path,
    federation: str = "steel",
    nodes: Sequence[str] = ("plant-a", "plant-b"),
    *,
    host: str = HOST,
    port: int = 8883,
    days: int = 365,
    ago: timedelta = timedelta(),
) -> Members:
    """A new federation in `folder`, of coordinator, monitor and `nodes`; made `ago`."""
    return _provision(
        folder, federation, ChangeRequest(nodes=nodes, hosts=[host], port=port, days=days), ago
    )


def _provision(folder: Path, federation: str, request: ChangeRequest, ago: timedelta) -> Members:
    registry = provision(folder, federation, request, datetime.now(UTC) - ago).registry
    return Members(folder, registry, {kit.name: kit for kit in kits(registry)})


def meet(server: Members, client: Kit, flags: ssl.VerifyFlags = ssl.VERIFY_X509_STRICT) -> str:
    """A TLS handshake in memory, as strict as Python 3.13 and mosquitto are:
    its version; SSLError if it fails.
    """
    broker = server.folder / "broker"
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_cert_chain(broker / "broker.pem", broker / "broker.key")
    here.load_verify_locations(broker / "ca.pem")
    here.load_verify_locations(broker / "crl.pem")
    here.verify_mode = ssl.CERT_REQUIRED
    here.verify_flags |= flags | ssl.VERIFY_CRL_CHECK_LEAF
    there = client.tls_context()
    there.verify_flags |= flags
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        here.wrap_bio(up, down, server_side=True),
        there.wrap_bio(down, up, server_hostname=server.registry.hosts[0]),
    ]
    for _ in range(4):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return sides[0].version() or ""


def connect(endpoint: Endpoint, name: str = "", *filters: str) -> tuple[MqttClient, Queue[Any]]:
    inbox: Queue[Any] = Queue()
    mqtt = MqttClient(
        endpoint,
        name or f"edge-node/{random.getrandbits(64):x}",
        inbox=inbox,
        persistent=bool(name),
    )
    mqtt.subscribe(*filters)
    mqtt.open()
    assert isinstance(inbox.get(timeout=60), Connected)
    return mqtt, inbox


def admitted(its: Kit) -> bool:
    """Whether the broker takes the kit; BrokerError says why not."""
    connect(Endpoint.from_kit(its))[0].close()
    return True


class Guarded:
    """A mosquitto with a federation's generated configuration, as it is:
    `members` are those that it was made for.
    """

    def __init__(self, members: Members):
        self.members = members
        self.url = members.kits["coordinator"].broker
        self.log = members.folder / "mosquitto.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def kits(self) -> dict[str, Kit]:
        return self.members.kits

    @property
    def folder(self) -> Path:
        return self.members.folder

    def start(self) -> None:
        """Return once it listens."""
        folder = self.folder / "broker"
        if os.getuid() == 0:  # started by root it changes to the user mosquitto
            self.folder.chmod(0o711)
            for path in (folder, *folder.rglob("*")):
                shutil.chown(path, "mosquitto")
        said = len(self.log.read_text()) if self.log.exists() else 0
        with self.log.open("ab") as log:
            command = [str(find_mosquitto()), "-c", str(folder / "mosquitto.conf")]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.wait_for("running", said)

    def wait_for(self, words: str, after: int = 0) -> None:
        """Return once its log says so, beyond the first `after` bytes."""
        wait_until(
            lambda: words in self.log.read_text()[after:],
            meanwhile=lambda: self._process is not None and self._process.poll() is None,
            said=lambda: self.log.read_text()[after:],
        )

    def reload(self) -> None:
        """Let it read configuration, certificates and revocations again, while it runs."""
        assert self._process is not None
        said = len(self.log.read_text())
        self._process.send_signal(signal.SIGHUP)
        self.wait_for("Reloading config", said)

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()


@contextmanager
def guarded(folder: Path, **options: Any) -> Iterator[Guarded]:
    """A running mosquitto for a new federation in `folder`, which all users can reach;
    `options` as in `make`.
    """
    broker = Guarded(make(folder, port=free_port(), **options))
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
