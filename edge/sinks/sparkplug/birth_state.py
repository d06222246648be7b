"""What an edge node must know after a restart: the number of its connection, and its name at the broker."""

import hashlib
import logging
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError
from broker_config.storage.disk import replace_bytes, writing
from edge.sinks.sparkplug.edge_node import SEQUENCES, Identity

_log = logging.getLogger(__name__)


class _Facts(Struct):
    birth_death: int  # of the latest connection
    client: str  # the same at each connection: the broker then ends one that it has not yet seen die


class Memory:
    """A file for each edge node at each broker."""

    def __init__(self, folder: Path, endpoint: Endpoint, identity: Identity) -> None:
        place = f"{endpoint.host}:{endpoint.port}/{identity.group}/{identity.node}"
        self._path = folder / f"sparkplug-{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"
        try:
            self._facts = msgspec.json.decode(self._path.read_bytes(), type=_Facts)
        except (OSError, msgspec.DecodeError):
            self._facts = _Facts(birth_death=-1, client=f"edge-node-{secrets.token_hex(8)}")

    @property
    def client(self) -> str:
        """The client identifier at the broker."""
        return self._facts.client

    def next(self) -> int:
        """The bdSeq of the CONNECT packet that is sent next: one more than the latest; 0 at first and after 255."""
        self._facts.birth_death = (self._facts.birth_death + 1) % SEQUENCES
        try:
            with writing(self._path.parent):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_bytes(self._path, msgspec.json.encode(self._facts))
        except EdgeNodeError as error:  # better a number that is used again than no connection
            _log.warning("%s", error)
        return self._facts.birth_death
