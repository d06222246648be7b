"""Brokers for all tests: real ones, one for each test."""

import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from broker_config.broker.embedded import EmbeddedBroker, find_mosquitto, start_broker
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.provisioned_federation import Guarded, guarded

# Workers share the processors: with a thread each, tests that train take a quarter less of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background lets them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


# As most machines have it: what leaks file descriptors fails here, and not first at a user's.
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a line remembers by default is no business of the user's who tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(params=["mosquitto", "amqtt"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """Each kind of broker in turn."""
    with start_broker(tmp_path / "broker", kind=request.param) as running:
        yield running


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A mosquitto."""
    with start_broker(tmp_path / "broker", kind="mosquitto") as running:
        yield running


class Secured(NamedTuple):
    """A mosquitto that admits nobody on `closed`, and whoever the listener's name says on the others (ports)."""

    closed: int
    tls: int
    ws: int
    wss: int
    mutual: int  # TLS with client certificates
    authority: Authority


SECURED = """
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


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder, "plant")
    certificate, key = authority.issue("broker")
    folder.chmod(0o755)
    key.chmod(0o644)  # mosquitto reads it as another user when root starts it
    server = Secured(*(free_port() for _ in range(5)), authority)
    config = folder / "mosquitto.conf"
    config.write_text(
        "user root\n" + SECURED.format(**server._asdict(), certificate=certificate, key=key, ca=authority.ca)
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([str(find_mosquitto()), "-c", str(config)], stderr=log, stdout=log)
    while "running" not in (said := (folder / "log").read_text()):
        assert process.poll() is None, said
        time.sleep(0.01)
    yield server
    process.terminate()
    process.wait()


@pytest.fixture(scope="module")
def provisioned() -> Iterator[Guarded]:
    """A mosquitto as `edge-node provision` configures it for federation steel, with its members' kits."""
    with tempfile.TemporaryDirectory() as passable:  # pytest's folders are closed to the user mosquitto
        Path(passable).chmod(0o711)
        with guarded(Path(passable) / "steel") as broker:
            yield broker
