"""Hundreds of nodes that train nothing on one connection:
the load of many contributions, without that of their nodes.

As in `benchmarks/synthetic_nodes.py` each offers a blob of its own in each round. What they save is
their own: together they have one connection, one thread and one copy of each broadcast.
"""

import hashlib
import queue
from collections.abc import Sequence
from pathlib import Path

from benchmarks.synthetic_nodes import BLOBS, CHUNK, Master, own_number, own_weight
from broker_config.mqtt.client import Connected, Delivery, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import decode_any, encode, encode_chunk
from broker_config.protocol.messages import (
    Contribution,
    Finished,
    Hello,
    Manifest,
    Presence,
    RoundState,
    Spec,
    Want,
)
from broker_config.transfer.blob_transfer import BlobStore, BlobTransfer, Fetched

_SILENCE = 600.0  # seconds after which there is no federation any more


class LightNodes:
    """Nodes of these numbers in one federation;
    what number 0 receives lies in `folder` as `broadcast-N`.
    """

    def __init__(self, url: str, spec: Spec, numbers: Sequence[int], folder: Path):
        self._spec, self._keeps = spec, folder if 0 in numbers else None
        self._nodes = {f"node-{number:03}": number for number in numbers}
        first, endpoint = next(iter(self._nodes)), Endpoint.parse(url)
        mine = folder / first
        mine.mkdir()
        self._masters = [Master(spec, number, mine) for number in range(BLOBS)]
        self._data = [master.path.read_bytes() for master in self._masters]
        self._store = BlobStore(mine / "blobs")
        self._inbox: queue.Queue[object] = queue.Queue()
        self._mqtt = MqttClient(
            endpoint, f"light-{spec.federation}-{first}", inbox=self._inbox, persistent=False
        )
        self._transfer = BlobTransfer(endpoint, spec.federation, first, self._store, self._inbox)
        self._broadcast, self._finished = "", False

    def run(self) -> None:
        """Take part to the end."""
        federation, names = self._spec.federation, self._nodes
        self._mqtt.subscribe(
            topics.round_state(federation),
            topics.presence(federation, topics.COORDINATOR),
            *(topics.down(federation, name) for name in names),
            *(topics.want(federation, name, topics.COORDINATOR) for name in names),
        )
        self._transfer.start()
        with self._mqtt:
            while not self._is_last(self._inbox.get(timeout=_SILENCE)):
                pass
            for name in names:
                self._tell(name, Finished(session=_session(name), run=self._spec.run))
            self._mqtt.flush(60)
        self._transfer.close()

    def _is_last(self, event: object) -> bool:
        """Do what an event asks for; whether it was the result's arrival."""
        match event:
            case Connected():
                self._announce()
            case Delivery():
                self._mqtt.ack(event)
                self._hear(event, decode_any(event.payload))
            case Fetched(manifest):
                return self._received(manifest)
        return False

    def _announce(self) -> None:
        for name in self._nodes:
            here = Presence(session=_session(name), online=True)
            self._mqtt.publish(
                topics.presence(self._spec.federation, name), encode(here), retain=True
            )
            self._tell(
                name, Hello(session=_session(name), run=self._spec.run, software="benchmark")
            )

    def _hear(self, delivery: Delivery, message: object) -> None:
        match message:
            case RoundState(broadcast=Manifest() as broadcast) if (
                broadcast.digest != self._broadcast
            ):
                self._broadcast, self._finished = broadcast.digest, message.status == "finished"
                self._transfer.fetch(broadcast)
            case Presence(online=True) if not delivery.retain:  # a roll call
                self._announce()
            case Want():
                self._send(delivery.topic.split("/")[4], message)

    def _received(self, manifest: Manifest) -> bool:
        if self._keeps:
            kept = self._keeps / f"broadcast-{manifest.round + self._finished}"
            kept.write_bytes(self._store.path(manifest.digest).read_bytes())
        self._store.remove(manifest.digest)
        if not self._finished:
            for name in self._nodes:
                self._contribute(name, manifest.round)
        return self._finished

    def _contribute(self, name: str, round_: int) -> None:
        number = self._nodes[name]
        master = self._masters[number % BLOBS]
        blob = Manifest(
            federation=self._spec.federation,
            run=self._spec.run,
            round=round_,
            node=name,
            digest=master.digest(own_number(number, round_).tobytes()),
            size=master.size,
            chunk_size=CHUNK,
        )
        weight, session = own_weight(number), _session(name)
        self._tell(
            name,
            Contribution(session=session, run=blob.run, round=round_, weight=weight, blob=blob),
        )

    def _send(self, name: str, want: Want) -> None:
        number = self._nodes[name]
        master, data = self._masters[number % BLOBS], self._data[number % BLOBS]
        for round_ in range(1, self._spec.rounds + 1):
            tail = own_number(number, round_).tobytes()
            if master.digest(tail) == want.digest:
                break
        else:
            return
        topic = topics.chunks(self._spec.federation, name, want.digest, want.chunk_size)
        for index in want.chunks:
            start = index * want.chunk_size
            chunk = data[start : start + want.chunk_size]
            if start + len(chunk) == master.size:
                chunk = chunk[:-4] + tail
            self._mqtt.publish(topic, encode_chunk(index, chunk), qos=0)

    def _tell(self, name: str, message: Hello | Contribution | Finished) -> None:
        self._mqtt.publish(topics.up(self._spec.federation, name), encode(message))


def _session(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def share(url: str, spec: Spec, numbers: Sequence[int], folder: Path) -> None:
    """Let the nodes of these numbers take part in this process, to the federation's end."""
    LightNodes(url, spec, numbers, folder).run()
