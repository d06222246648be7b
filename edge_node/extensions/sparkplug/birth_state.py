"""Durable state of an edge node: the number of its latest connection,
and its client id at the broker.
"""

import hashlib
import logging
import secrets
from pathlib import Path

from msgspec import Struct

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError
from broker_config.storage import checksums
from broker_config.storage.disk import writing
from edge_node.extensions.sparkplug.edge_node import SEQUENCES, Identity

_log = logging.getLogger(__name__)


class _State(Struct):
    birth_death: int  # of the latest connection
    # the same for every connection, so that the broker ends one that it has not yet noticed to be
    # gone
    client: str


class BirthState:
    """A file for each edge node at each broker."""

    def __init__(self, folder: Path, endpoint: Endpoint, identity: Identity) -> None:
        place = f"{endpoint.host}:{endpoint.port}/{identity.group}/{identity.node}"
        self._path = folder / f"sparkplug-{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"
        try:
            found = checksums.read_record(self._path, _State)
        except (OSError, checksums.DamagedError) as error:
            _log.warning(
                "%s is damaged (%s): this edge node gets another client id", self._path, error
            )
            found = None
        self._state = found or _State(birth_death=-1, client=f"edge-node-{secrets.token_hex(8)}")

    @property
    def client(self) -> str:
        """The client identifier at the broker."""
        return self._state.client

    def next_birth_death(self) -> int:
        """The bdSeq of the CONNECT packet that is sent next: one more than the latest;
        0 at first and after 255.
        """
        self._state.birth_death = (self._state.birth_death + 1) % SEQUENCES
        try:
            with writing(self._path.parent):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                checksums.write_record(self._path, self._state)
        except EdgeNodeError as error:  # better to reuse a number than not to connect
            _log.warning("%s", error)
        return self._state.birth_death
