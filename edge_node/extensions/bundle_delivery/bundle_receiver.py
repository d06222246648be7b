"""Receiver of bundles for a line, over MQTT from the plant's own trainer on the plant's own broker.

No sender is trusted: a bundle is fetched only after manifest and signature have shown that the
line's own node has made it, and then exactly the files whose hashes the manifest lists. Offers are
processed one at a time.
"""

import logging
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from broker_config.mqtt.client import Delivery, Disconnected, MqttClient
from broker_config.protocol.errors import EdgeNodeError, UsageError, abbreviate, explain
from broker_config.protocol.topics import check_name
from broker_config.transfer.blob_store import BlobStore
from broker_config.transfer.blob_transfer import BlobTransfer, Fetched, FetchFailed
from edge.bundle import bundle_format
from edge.bundle.bundle_format import Manifest
from edge.config.broker_settings import BrokerSettings
from edge.daemon.line_parts import ServedLine
from edge.registry.rollout import RefusedError, Rollout
from edge_node.extensions.bundle_delivery import topics
from edge_node.extensions.bundle_delivery.bundle_messages import (
    MAX_BYTES,
    Addressee,
    Answer,
    Offer,
    blob_manifests,
    encode,
)

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier

_QUEUED = 64  # events at most, each with a message
_RETRY = 5.0  # seconds between two attempts to reach the broker
_REPORT = 2.0  # seconds between two progress messages to a sender
_MAX_LOGGED = 100  # refusals
_SIGNED = (bundle_format.MANIFEST, bundle_format.SIGNATURE, bundle_format.CHARTER)

_log = logging.getLogger(__name__)


class Settings(BrokerSettings, frozen=True, kw_only=True):
    """Table `[arrival]` of a line's settings: the plant's own broker,
    over which new bundles come.
    """

    activate: bool = True  # a bundle that passes the gate; otherwise it is only stored

    def open_part(self, line: ServedLine) -> AbstractContextManager[None]:
        """Receive bundles until the context ends;
        UsageError when the settings or a missing verifier forbid it.
        """
        receiver = BundleReceiver(self, line.instance.line, line.rollout, line.verifier)
        return receiver.run_in_background()


class OfferError(UsageError):
    """An offer that the line does not accept."""


class BundleReceiver:
    """Receives bundles for a line in its own thread; reconnects by itself."""

    def __init__(
        self,
        settings: Settings,
        line: str,
        rollout: Rollout,
        verifier: "Verifier | None",
        silence: float = 10.0,
    ) -> None:
        """`silence`: seconds without a byte after which a transfer is abandoned.

        UsageError when the settings are inconsistent, or there is no verifier to check signatures.
        """
        if verifier is None:
            raise UsageError(
                "[arrival] takes bundles from a broker, and nothing says whose signature they "
                "must bear",
                "add --trust FILE, or leave [arrival] out",
            )
        self._endpoint = settings.endpoint()
        self._line = check_name(line, "the line's name")
        self._rollout = rollout
        self._verifier = verifier
        self._activate = settings.activate
        self._events: queue.Queue[Any] = queue.Queue(_QUEUED)
        self._folder = rollout.store.folder / "arriving"
        self._silence = silence
        self._refusals = 0
        self._stop = threading.Event()

    @contextmanager
    def run_in_background(self) -> Iterator[None]:
        """Receive bundles until the block ends."""
        thread = threading.Thread(target=self._run, name="bundle receiver", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        last_error = ""
        while not self._stop.is_set():
            try:
                me = f"edge-node-arrival-{uuid.uuid4().hex}"
                with MqttClient(self._endpoint, me, inbox=self._events, persistent=False) as mqtt:
                    last_error = ""
                    mqtt.subscribe(topics.offers(self._line))
                    self._listen(mqtt)
            except EdgeNodeError as error:
                if error.what != last_error:
                    _log.warning("no bundle can arrive: %s; trying again", error.what)
                last_error = error.what
            except Exception:
                _log.exception("an error while bundles were waited for; going on")
            self._stop.wait(_RETRY)

    def _listen(self, mqtt: MqttClient) -> None:
        while not self._stop.is_set():
            event = self._next_event(0.2)
            if isinstance(event, Delivery) and (offer := self._parse_offer(event)):
                self._answer(mqtt, self._process(mqtt, offer))

    def _next_event(self, seconds: float) -> Any:
        """The next event, if one comes in time; messages are acknowledged,
        whatever becomes of them.
        """
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, Delivery):
            event.client.ack(event)
        return event

    def _parse_offer(self, message: Delivery) -> Offer | None:
        """The offer in a message; a malformed one is refused, if it names its sender."""
        try:
            return msgspec.json.decode(message.payload, type=Offer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            why = abbreviate(str(error))
        try:
            sender = msgspec.json.decode(message.payload, type=Addressee).sender
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            sender = ""
        self._log_refusal(sender, f"what was offered cannot be read: {why}")
        if sender:
            self._answer(
                message.client,
                Answer(sender=sender, state="refused", text=f"the offer cannot be read: {why}"),
            )
        return None

    def _process(self, mqtt: MqttClient, offer: Offer) -> Answer:
        try:
            return self._accept(mqtt, offer)
        except Exception as error:
            explained = explain(error)
            self._log_refusal(offer.sender, explained.what)
            found = explained.findings if isinstance(explained, RefusedError) else ()
            return Answer(
                sender=offer.sender,
                state="refused",
                text=explained.what,
                remedy=explained.remedy,
                findings=found,
            )

    def _accept(self, mqtt: MqttClient, offer: Offer) -> Answer:
        """Fetch, verify, store and serve an offered bundle;
        EdgeNodeError when one of these fails.
        """
        if sum(each.size for each in offer.files) > MAX_BYTES:
            raise OfferError(
                f"the bundle has more than {MAX_BYTES >> 20} MiB", "send a smaller one"
            )
        blobs_ = BlobStore(self._folder)
        blobs_.purge(
            {each.digest for each in offer.files}
        )  # keeps what an interrupted transfer has left of this bundle
        me = f"line-{uuid.uuid4().hex[:16]}"
        transfer = BlobTransfer(
            self._endpoint, topics.namespace(self._line), me, blobs_, self._events
        )
        transfer.start()
        try:
            manifest = self._fetch_manifest(mqtt, transfer, offer, blobs_)
            self._fetch(mqtt, transfer, offer, self._listed_files(offer, manifest))
        finally:
            transfer.close()
        with self._assemble(
            offer, blobs_, [*_SIGNED, *self._listed_files(offer, manifest)]
        ) as folder:
            digest = self._rollout.store.add(folder, f"{offer.sender}, over MQTT")
        blobs_.purge(())
        if not self._activate:
            return Answer(
                sender=offer.sender,
                state="stored",
                text=f"{manifest.id} ({digest}) is in the store",
            )
        self._answer(
            mqtt, Answer(sender=offer.sender, state="fetching", text="trying the model out")
        )
        findings = self._rollout.activate(digest, f"{offer.sender}, over MQTT")
        text = f"{manifest.id} ({digest}) is served"
        return Answer(sender=offer.sender, state="active", text=text, findings=tuple(findings))

    def _fetch_manifest(
        self, mqtt: MqttClient, transfer: BlobTransfer, offer: Offer, blobs_: BlobStore
    ) -> Manifest:
        """The manifest, once it is verified that the line's own node has signed it and that it
        may be served.
        """
        for name in _SIGNED:
            sizes = [each.size for each in offer.files if each.name == name]
            if len(sizes) != 1 or sizes[0] > bundle_format.LARGEST[name]:
                raise OfferError(
                    f"the bundle has no {name}, or one that is too large", "export it with a kit"
                )
        self._fetch(mqtt, transfer, offer, _SIGNED)
        with self._assemble(offer, blobs_, _SIGNED) as folder:
            manifest = self._verifier._replace(accept_older=False).check_manifest(folder)
        [digest] = [each.digest for each in offer.files if each.name == bundle_format.MANIFEST]
        self._rollout.check_bad(digest[:12])
        return manifest

    def _listed_files(self, offer: Offer, manifest: Manifest) -> list[str]:
        """The names of the files that the manifest lists;
        OfferError unless exactly these are offered.
        """
        listed = {part.file: part.sha256 for part in bundle_format.parts(manifest)}
        offered = {each.name: each.digest for each in offer.files if each.name not in _SIGNED}
        if listed != offered or len(offer.files) != len(listed) + len(_SIGNED):
            differing = sorted(offered.items() ^ listed.items())
            first_name = differing[0][0] if differing else ""
            first = abbreviate(repr(first_name))
            raise OfferError(
                f"what is offered is not what the manifest lists: {first}",
                "send the bundle folder as it was exported",
            )
        return list(listed)

    def _fetch(
        self, mqtt: MqttClient, transfer: BlobTransfer, offer: Offer, names: Sequence[str]
    ) -> None:
        missing = {each.digest: each for each in blob_manifests(offer, names)}
        total = sum(each.size for each in missing.values())
        for each in missing.values():
            transfer.fetch(each)
        progressed = reported = time.monotonic()
        received = transfer.bytes_received
        while missing:
            match self._next_event(0.2):
                case Fetched(manifest) if manifest.node == offer.sender:
                    missing.pop(manifest.digest, None)
                case FetchFailed(manifest, error) as failed if manifest.node == offer.sender:
                    remedy = "send it again"
                    raise failed.ours(f"then {remedy}") or OfferError(
                        f"the bundle could not be fetched: {error}", remedy
                    )
                case Delivery() as message if (
                    other := self._parse_offer(message)
                ) and other.sender != offer.sender:
                    self._answer(
                        mqtt,
                        Answer(
                            sender=other.sender, state="busy", text="another bundle is arriving"
                        ),
                    )
                case Disconnected():
                    progressed = time.monotonic()
            now = time.monotonic()
            if transfer.bytes_received != received:
                progressed = now
                received = transfer.bytes_received
            if now - progressed > self._silence or self._stop.is_set():
                raise OfferError(
                    "the bundle did not arrive: nothing came any more",
                    "send it again; it goes on there",
                )
            if now - reported > _REPORT:
                reported = now
                self._answer(
                    mqtt,
                    Answer(
                        sender=offer.sender, state="fetching", text=f"{received} of {total} bytes"
                    ),
                )

    @contextmanager
    def _assemble(self, offer: Offer, blobs_: BlobStore, names: Sequence[str]) -> Iterator[Path]:
        """A folder with these files under their names, which are plain: the manifest's, or ours."""
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
            mqtt.publish(topics.answers(self._line), encode(answer))
        except EdgeNodeError as error:  # too many messages wait for the broker
            self._log_refusal(answer.sender, error.what)

    def _log_refusal(self, sender: str, what: str) -> None:
        self._refusals += 1
        if self._refusals <= _MAX_LOGGED:
            _log.warning("a bundle from %s is not taken: %s", sender or "somebody", what)
