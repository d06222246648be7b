"""Bundles that come to a line over MQTT, from the plant's own trainer on the plant's own broker.

Nobody is believed: what is offered is fetched only after manifest and signature have shown that the line's own node has
made it, and then exactly the files whose hashes the manifest lists. One offer is looked at at a time.
"""

import logging
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from broker_config.mqtt.client import Delivery, Disconnected, MqttClient
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.errors import EdgeNodeError, UsageError, brief, explain
from broker_config.transfer.blob_store import BlobStore
from broker_config.transfer.blob_transfer import BlobTransfer, Fetched, FetchFailed
from edge.bundle import bundle_format
from edge.bundle.bundle_format import Manifest
from edge.registry.bundle_messages import LARGEST, Addressed, Answer, Offer, Settings, blobs, encode
from edge.registry.rollout import RefusedError, Rollout

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier

_WAITING = 64  # events, of a message each
_RETRY = 5.0  # seconds between two attempts to reach the broker
_TELL = 2.0  # seconds between two words to a sender that is being fetched from
_SILENCE = 10.0  # seconds without a byte after which a sender is given up
_COMPLAINTS = 100  # offers that are told in the log
_SIGNED = (bundle_format.MANIFEST, bundle_format.SIGNATURE, bundle_format.CHARTER)

_log = logging.getLogger(__name__)


class OfferError(UsageError):
    """An offer that the line does not take."""


class BundleReceiver:
    """Takes bundles for a line, in a thread of its own; connects by itself, again and again."""

    def __init__(self, settings: Settings, line: str, rollout: Rollout, verifier: "Verifier | None") -> None:
        """UsageError when the settings do not go together, or there is no verifier to check signatures."""
        if verifier is None:
            raise UsageError(
                "[arrival] takes bundles from a broker, and nothing says whose signature they must bear",
                "add --trust FILE, or leave [arrival] out",
            )
        self._endpoint = Endpoint.parse(settings.url, ca=settings.ca, cert=settings.cert, key=settings.key)
        self._line = topics.check_name(line, "the line's name")
        self._rollout, self._verifier, self._activate = rollout, verifier, settings.activate
        self._events: queue.Queue[Any] = queue.Queue(_WAITING)
        self._folder = rollout.store.folder / "arriving"
        self._complaints = 0
        self._stop = threading.Event()

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Take bundles meanwhile."""
        thread = threading.Thread(target=self._run, name="arrival", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        said = ""
        while not self._stop.is_set():
            try:
                me = f"edge-node-arrival-{uuid.uuid4().hex}"
                with MqttClient(self._endpoint, me, inbox=self._events, persistent=False) as mqtt:
                    said = ""
                    mqtt.subscribe(topics.bundle_offers(self._line))
                    self._listen(mqtt)
            except EdgeNodeError as error:
                if error.what != said:
                    _log.warning("no bundle can arrive: %s; trying again", error.what)
                said = error.what
            except Exception:
                _log.exception("an error while bundles were waited for; going on")
            self._stop.wait(_RETRY)

    def _listen(self, mqtt: MqttClient) -> None:
        while not self._stop.is_set():
            event = self._next(0.2)
            if isinstance(event, Delivery) and (offer := self._offered(event)):
                self._answer(mqtt, self._judged(mqtt, offer))

    def _next(self, seconds: float) -> Any:
        """What happens next, if anything does; offers are acknowledged, whatever becomes of them."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, Delivery):
            event.client.ack(event)
        return event

    def _offered(self, message: Delivery) -> Offer | None:
        """The offer in a message; one that is none is refused, if it says by whom it is."""
        try:
            return msgspec.json.decode(message.payload, type=Offer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            why = brief(str(error))
        try:
            sender = msgspec.json.decode(message.payload, type=Addressed).sender
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            sender = ""
        self._complain(sender, f"what was offered cannot be read: {why}")
        if sender:
            self._answer(
                message.client, Answer(sender=sender, state="refused", text=f"the offer cannot be read: {why}")
            )
        return None

    def _judged(self, mqtt: MqttClient, offer: Offer) -> Answer:
        try:
            return self._taken(mqtt, offer)
        except Exception as error:
            explained = explain(error)
            self._complain(offer.sender, explained.what)
            found = explained.findings if isinstance(explained, RefusedError) else ()
            return Answer(
                sender=offer.sender, state="refused", text=explained.what, remedy=explained.remedy, findings=found
            )

    def _taken(self, mqtt: MqttClient, offer: Offer) -> Answer:
        """Fetch, verify, store and serve what is offered; EdgeNodeError when one of these cannot be."""
        if sum(each.size for each in offer.files) > LARGEST:
            raise OfferError(f"the bundle has more than {LARGEST >> 20} MiB", "send a smaller one")
        blobs_ = BlobStore(self._folder)
        blobs_.purge({each.digest for each in offer.files})  # what came of this bundle before is of use
        me = f"line-{uuid.uuid4().hex[:16]}"
        transfer = BlobTransfer(self._endpoint, topics.line_namespace(self._line), me, blobs_, self._events)
        transfer.start()
        try:
            manifest = self._vouched(mqtt, transfer, offer, blobs_)
            self._fetch(mqtt, transfer, offer, self._wanted(offer, manifest))
        finally:
            transfer.close()
        with self._assembled(offer, blobs_, [*_SIGNED, *self._wanted(offer, manifest)]) as folder:
            digest = self._rollout.store.add(folder, f"{offer.sender}, over MQTT")
        blobs_.purge(())
        if not self._activate:
            return Answer(sender=offer.sender, state="stored", text=f"{manifest.id} ({digest}) is in the store")
        self._answer(mqtt, Answer(sender=offer.sender, state="fetching", text="trying the model out"))
        findings = self._rollout.activate(digest, f"{offer.sender}, over MQTT")
        text = f"{manifest.id} ({digest}) is served"
        return Answer(sender=offer.sender, state="active", text=text, findings=tuple(findings))

    def _vouched(self, mqtt: MqttClient, transfer: BlobTransfer, offer: Offer, blobs_: BlobStore) -> Manifest:
        """The manifest, once it is sure that the line's own node has signed it, and that it may be served."""
        for name in _SIGNED:
            sizes = [each.size for each in offer.files if each.name == name]
            if len(sizes) != 1 or sizes[0] > bundle_format.LARGEST[name]:
                raise OfferError(f"the bundle has no {name}, or one that is too large", "export it with a kit")
        self._fetch(mqtt, transfer, offer, _SIGNED)
        with self._assembled(offer, blobs_, _SIGNED) as folder:
            manifest = self._verifier._replace(accept_older=False).check_manifest(folder)
        [digest] = [each.digest for each in offer.files if each.name == bundle_format.MANIFEST]
        self._rollout.check_bad(digest[:12])
        return manifest

    def _wanted(self, offer: Offer, manifest: Manifest) -> list[str]:
        """The names of the files that the manifest lists; each is offered as it is listed, and nothing else is."""
        listed = {part.file: part.sha256 for part in bundle_format.parts(manifest)}
        offered = {each.name: each.digest for each in offer.files if each.name not in _SIGNED}
        if listed != offered or len(offer.files) != len(listed) + len(_SIGNED):
            odd = sorted(offered.items() ^ listed.items())
            raise OfferError(
                f"what is offered is not what the manifest lists: {brief(repr(odd[0][0] if odd else ''))}",
                "send the bundle folder as it was exported",
            )
        return list(listed)

    def _fetch(self, mqtt: MqttClient, transfer: BlobTransfer, offer: Offer, names: Sequence[str]) -> None:
        missing = {each.digest: each for each in blobs(offer, names)}
        total = sum(each.size for each in missing.values())
        for each in missing.values():
            transfer.fetch(each)
        moved = told = time.monotonic()
        received = transfer.bytes_received
        while missing:
            match self._next(0.2):
                case Fetched(manifest) if manifest.node == offer.sender:
                    missing.pop(manifest.digest, None)
                case FetchFailed(manifest, reason) if manifest.node == offer.sender:
                    raise OfferError(f"the bundle could not be fetched: {reason}", "send it again")
                case Delivery() as message if (other := self._offered(message)) and other.sender != offer.sender:
                    self._answer(mqtt, Answer(sender=other.sender, state="busy", text="another bundle is arriving"))
                case Disconnected():
                    moved = time.monotonic()
            now = time.monotonic()
            if transfer.bytes_received != received:
                moved, received = now, transfer.bytes_received
            if now - moved > _SILENCE or self._stop.is_set():
                raise OfferError("the bundle did not arrive: nothing came any more", "send it again; it goes on there")
            if now - told > _TELL:
                told = now
                self._answer(mqtt, Answer(sender=offer.sender, state="fetching", text=f"{received} of {total} bytes"))

    @contextmanager
    def _assembled(self, offer: Offer, blobs_: BlobStore, names: Sequence[str]) -> Iterator[Path]:
        """These files under their names, in a folder; they are plain names: the manifest's, or ours."""
        folder = self._folder.with_name("assembling")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with blobs_.writing():
                folder.mkdir()
                for each in offer.files:
                    if each.name in names:
                        os.link(blobs_.path(each.digest), folder / each.name)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _answer(self, mqtt: MqttClient, answer: Answer) -> None:
        try:
            mqtt.publish(topics.bundle_answers(self._line), encode(answer))
        except EdgeNodeError as error:  # too many wait for the broker
            self._complain(answer.sender, error.what)

    def _complain(self, sender: str, what: str) -> None:
        self._complaints += 1
        if self._complaints <= _COMPLAINTS:
            _log.warning("a bundle from %s is not taken: %s", sender or "somebody", what)
