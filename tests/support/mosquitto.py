"""A mosquitto that can be killed and started again."""

import subprocess
from functools import partial
from pathlib import Path

from broker_config.broker.embedded import find_mosquitto
from tests.support.ports import accepts_connections, free_port
from tests.support.waiting import wait_until

BROKER = "broker"

_CONFIG = """
listener {port} 127.0.0.1
allow_anonymous true
max_queued_messages 0
set_tcp_nodelay true
user root
sys_interval 0
persistence {persistence}
persistence_location {folder}/
autosave_interval 1
log_dest file {folder}/broker.log
{more}
"""


class Mosquitto:
    """A mosquitto that comes back on the same port;
    with persistence it comes back up to a second behind.
    """

    name = BROKER

    def __init__(self, folder: Path, *, persistence: bool, more: str = ""):
        folder.mkdir()
        self.log = folder / "broker.log"
        self.port = free_port()
        self.url = f"mqtt://127.0.0.1:{self.port}"
        self._config = folder / "mosquitto.conf"
        settings = {
            "port": self.port,
            "folder": folder,
            "persistence": str(persistence).lower(),
            "more": more,
        }
        self._config.write_text(_CONFIG.format(**settings), encoding="ascii")

    def start(self) -> None:
        """Start it; return when it listens."""
        errors = self.log.with_suffix(".err")
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(find_mosquitto()), "-c", self._config], stderr=stderr
            )
        wait_until(
            lambda: accepts_connections(self.port),
            meanwhile=lambda: self._process.poll() is None,
            said=lambda: self.log.read_text() + errors.read_text(),
        )

    def wait_until_saved(self) -> None:
        """Wait until all that it knows now is on the disk:
        the second file from now on was begun after this moment.
        """
        file = self.log.with_name("mosquitto.db")
        for _ in range(2):
            wait_until(partial(_is_written_since, file, _written(file)))

    @property
    def ended(self) -> int | None:
        """The exit code; minus the signal that ended it."""
        return self._process.poll()

    def end(self) -> None:
        """End it in order; what it keeps is on the disk then."""
        self._process.terminate()
        self._process.wait()

    def kill(self) -> None:
        """Kill -9, and wait until it is dead."""
        self._process.kill()
        self._process.wait()


def _written(file: Path) -> int:
    """When a file was written, in nanoseconds; 0 if it is not there."""
    return file.stat().st_mtime_ns if file.exists() else 0


def _is_written_since(file: Path, before: int) -> bool:
    return _written(file) not in (0, before)
