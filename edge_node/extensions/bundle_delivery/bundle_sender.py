"""Sender of a bundle to a line, over the plant's own broker."""

import queue
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from broker_config.mqtt.client import Delivery, MqttClient, read_retained
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.topics import check_name, federation_of, spec
from broker_config.transfer.blob_store import BlobStore
from broker_config.transfer.blob_transfer import BlobTransfer
from edge.bundle import bundle_format
from edge_node.extensions.bundle_delivery import topics
from edge_node.extensions.bundle_delivery.bundle_messages import Answer, File, Offer, encode

_AGAIN = 2.0  # seconds between two offers while there is no answer, or the line is busy
# seconds without a message from a line that has answered: it may be testing the model
_SILENCE = 120.0


def send_bundle(
    folder: Path,
    endpoint: Endpoint,
    line: str,
    report: Callable[[str], None],
    patience: float = 15.0,
) -> Answer:
    """Offer a bundle to a line until it has accepted or refused it;
    `report` is called with each state of progress.

    A line that has not answered after `patience` seconds is not there.

    Raises:
        UsageError: the bundle is damaged or not signed, or this is the broker of a federation.
        EdgeNodeError: the line does not answer.
        BrokerError: the broker cannot be reached.
    """
    check_name(line, "the line's name")
    found = bundle_format.read_bundle(folder)
    if not (folder / bundle_format.SIGNATURE).exists():
        raise UsageError(
            f"{folder} is not signed, and a line takes nothing else from a broker",
            "export it with the node's kit (edge-node export --kit)",
        )
    if specs := read_retained(endpoint, [spec("+")], 5.0):
        federation = federation_of(next(iter(specs)))
        raise UsageError(
            f"{endpoint} is the broker of federation {federation!r}, and a personal model does "
            "not leave the plant",
            "send it over the plant's own broker, or copy the folder",
        )
    with tempfile.TemporaryDirectory() as scratch:
        return _offer(found, BlobStore(Path(scratch)), endpoint, line, report, patience)


def _offer(
    found: bundle_format.Bundle,
    blobs: BlobStore,
    endpoint: Endpoint,
    line: str,
    report: Callable[[str], None],
    patience: float,
) -> Answer:
    sender = f"sender-{secrets.token_hex(8)}"
    events = queue.Queue[Any]()
    names = sorted(
        name for name in bundle_format.file_names(found.manifest) if (found.folder / name).exists()
    )
    files = tuple(
        File(name, *blobs.put(bundle_format.read_file(found.folder, name))) for name in names
    )
    transfer = BlobTransfer(endpoint, topics.namespace(line), sender, blobs, events)
    transfer.start()
    try:
        offer = Offer(sender=sender, chunk_size=transfer.chunk_size(), files=files)
        for each in files:
            transfer.offer(each.digest, offer.chunk_size)
        with MqttClient(endpoint, f"edge-node-{sender}", inbox=events, persistent=False) as mqtt:
            mqtt.subscribe(topics.answers(line))
            return _await_answer(mqtt, events, offer, line, report, patience)
    finally:
        transfer.close()


def _await_answer(
    mqtt: MqttClient,
    events: "queue.Queue[Any]",
    offer: Offer,
    line: str,
    report: Callable[[str], None],
    patience: float,
) -> Answer:
    """The line's final answer to the offer, which is repeated until the line answers."""
    heard = time.monotonic()
    offered = 0.0
    fetching = False
    text = ""
    limit = patience
    while (now := time.monotonic()) - heard < limit:
        if not fetching and now - offered > _AGAIN:
            offered = now
            mqtt.publish(topics.offers(line), encode(offer))
        answer = _next_answer(events, offer.sender)
        if answer is None:
            continue
        heard = time.monotonic()
        if answer.state not in ("fetching", "busy"):
            return answer
        fetching = answer.state == "fetching"
        limit = _SILENCE if fetching else patience
        if answer.text != text:
            text = answer.text
            report(text)
    raise EdgeNodeError(
        f"line {line!r} does not answer at {mqtt.endpoint}",
        "start it with a table [arrival] that names this broker, and --trust; see its log",
    )


def _next_answer(events: "queue.Queue[Any]", sender: str) -> Answer | None:
    """The line's next answer to us, if one comes within a moment."""
    try:
        event = events.get(timeout=0.1)
    except queue.Empty:
        return None
    if not isinstance(event, Delivery):
        return None
    event.client.ack(event)
    try:
        answer = msgspec.json.decode(event.payload, type=Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return answer if answer.sender == sender else None
