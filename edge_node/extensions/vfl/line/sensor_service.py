"""Service of a sensor: embedding of each product as its row appears in the file,
sent to the head's service.
"""

import logging
import queue
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from broker_config.mqtt.client import MqttClient, TakenOver
from broker_config.mqtt.collision import another_process
from broker_config.mqtt.endpoint import Endpoint
from edge.terminal.formatting import pluralize
from edge_node.extensions.vfl import topics as vfl_topics
from edge_node.extensions.vfl.frames import Embedded, encode_frame
from edge_node.extensions.vfl.line.bundle_reload import BundleReloader, NewModel
from edge_node.extensions.vfl.line.party_bundle import Array, Manifest
from edge_node.extensions.vfl.line.party_model import SensorModel
from edge_node.extensions.vfl.line.sensor_rows import RowFile, Samples

_log = logging.getLogger(__name__)

_POLL = 0.01  # seconds between two reads of the file
_BATCH = 256  # products that are embedded at once
_DRAIN = 5.0  # seconds to send what is left at the end

Protect = Callable[[Manifest, Array, Sequence[str]], Array]
"""Protects the embeddings [N, D] of products before they leave the sensor;
simulates a channel, if one is set.
"""


def serve_sensor(
    bundle: Path,
    load: Callable[[Path], SensorModel],
    rows: Path,
    endpoint: Endpoint,
    protect: Protect,
    stop: Callable[[], bool],
) -> int:
    """Serve until `stop`; return how many products were embedded.

    What the file holds at the start was there before, and gives only the history of samples. While
    the broker is away, products wait in the file.

    Raises:
        EdgeNodeError: the bundle, the file or the broker cannot be used at the start, or the file
            any more; or another process serves this sensor.
    """
    inbox: queue.Queue[Any] = queue.Queue()
    reloader = BundleReloader(bundle, load, inbox)
    model = reloader.load_first()
    manifest = model.manifest
    samples = Samples(
        RowFile(rows, manifest.columns, manifest.product, manifest.unit), manifest.cycles
    )
    samples.refresh()
    done = samples.count
    for newest in samples.since(done - 1):
        samples.drop_before(newest)
    client = f"edge-node/{manifest.federation}/{manifest.node}/embed"
    with MqttClient(endpoint, client, inbox=inbox, persistent=False) as mqtt, reloader:
        service = _Service(model, samples, mqtt, protect, done)
        sys.stderr.write(f"ready {manifest.node}, round {manifest.round}\n")
        if not done:
            sys.stderr.write(f"waiting for rows in {rows}\n")
        while not stop():
            service.handle_event(inbox)
            service.embed_new_rows()
        mqtt.flush(_DRAIN)
    sys.stderr.write(f"stopped {manifest.node}: {pluralize(service.sent, 'product')} embedded\n")
    return service.sent


class _Service:
    def __init__(
        self, model: SensorModel, samples: Samples, mqtt: MqttClient, protect: Protect, done: int
    ):
        self.sent = 0
        self._model = model
        self._samples = samples
        self._mqtt = mqtt
        self._protect = protect
        self._done = done
        self._topic = vfl_topics.products(model.manifest.federation, model.manifest.node)

    def handle_event(self, inbox: queue.Queue[Any]) -> None:
        """Handle the next event; wait a moment if there is none."""
        try:
            event = inbox.get(timeout=_POLL)
        except queue.Empty:
            return
        match event:
            case NewModel(model):
                self._exchange(model)
            case TakenOver():
                raise another_process(self._model.manifest.node)

    def embed_new_rows(self) -> None:
        """Embed what is new in the file, as long as the broker takes it."""
        if self._mqtt.is_crowded:
            return
        self._samples.refresh()
        new = self._samples.since(self._done)[:_BATCH]
        if not new:
            return
        self._done += len(new)
        if whole := [product for product in new if self._samples.has_sample(product)]:
            self._send(whole)
        self._samples.drop_before(new[-1])

    def _send(self, products: Sequence[str]) -> None:
        manifest = self._model.manifest
        samples, _ = self._samples.get(products)
        embedded = self._protect(manifest, self._model.embed(samples), products)
        for product, row in zip(products, embedded, strict=True):
            frame = Embedded(
                run=manifest.run, round=manifest.round, product=product, embedding=row.tobytes()
            )
            self._mqtt.publish(self._topic, encode_frame(frame))
        self.sent += len(products)

    def _exchange(self, model: SensorModel) -> None:
        if _input(model.manifest) == _input(self._model.manifest):
            self._model = model
            sys.stderr.write(f"now with the model of round {model.manifest.round}\n")
        else:
            _log.warning(
                "a newer bundle takes other samples than the one that is served: start this "
                "service again"
            )


def _input(manifest: Manifest) -> tuple[object, ...]:
    return manifest.node, manifest.columns, manifest.cycles, manifest.product, manifest.unit
