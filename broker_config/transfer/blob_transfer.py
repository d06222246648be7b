"""Transfer of blobs: one process serves them to others and fetches them from others,
over a connection of its own.

A holder sends a chunk to all that fetch the blob at the moment; an asker requests missing chunks
until it has them all.
"""

import logging
import queue
import secrets
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from paho.mqtt.client import topic_matches_sub

from broker_config.mqtt.client import (
    LARGEST_PACKET,
    Connected,
    Delivery,
    Disconnected,
    Endpoint,
    MqttClient,
)
from broker_config.mqtt.event_queue import EventQueue
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode, decode_chunk, encode, encode_chunk
from broker_config.protocol.errors import EdgeNodeError, PeerError
from broker_config.protocol.messages import Manifest, Want
from broker_config.transfer.blob_store import BlobStore
from broker_config.transfer.download import WINDOW, Download
from broker_config.transfer.send_queue import PERIOD, REPEATS, Allowances, SendQueue
from broker_config.transfer.transfer_slots import TransferSlots

__all__ = ["BlobStore", "BlobTransfer", "Damaged", "Download", "FetchFailed", "Fetched"]

log = logging.getLogger(__name__)

CHUNK = 256 * 1024  # bytes
CHUNK_OVERHEAD = 1024  # bytes of a packet that are not a chunk's data, at most
BACKLOG = 1 << 20  # bytes handed to the client and not yet written, at most one chunk more
EVENT_QUEUE = 8 * WINDOW  # bytes of chunks and requests that wait for the worker, at most one more
MAX_DOWNLOADS = 8  # blobs that are fetched at a time; they share the window
MAX_UNANSWERED = 2  # requests in a row after which a silent holder gives way to another
# requests of a peer without part in the federation, after which it is named: Hello may be on its
# way
MAX_IGNORED = 10
MAX_COMPLAINTS = 100  # peers of which an unreadable message is logged
KEEPALIVE = 60  # seconds: a slow connection may be busy with chunks for long


class Fetched(NamedTuple):
    """The blob of `manifest` is in the store."""

    manifest: Manifest


class FetchFailed(NamedTuple):
    """The blob of `manifest` could not be fetched; the holder's fault, or ours
    (a full disk, say).
    """

    manifest: Manifest
    error: EdgeNodeError | PeerError

    def ours(self, then: str) -> EdgeNodeError | None:
        """What is the matter here, with what to do, and `then` to do;
        None if it is the holder's fault.
        """
        error = self.error
        return (
            EdgeNodeError(error.what, f"{error.remedy}; {then}")
            if isinstance(error, EdgeNodeError)
            else None
        )


class Damaged(NamedTuple):
    """A blob that was offered is missing, or its bytes have changed: it is not offered any more."""

    digest: str


class _Job:
    """A blob to fetch, and all manifests that describe it in the same way."""

    def __init__(self, manifest: Manifest, topic: str):
        self.blob = manifest
        self.manifests = [manifest]
        self.topic = topic
        self.download: Download | None = None  # once it was active

    def matches(self, manifest: Manifest) -> bool:
        """Whether a manifest describes this blob, from this holder, in chunks of this size."""
        fields = ("node", "digest", "size", "chunk_size")
        return all(getattr(manifest, field) == getattr(self.blob, field) for field in fields)


class BlobTransfer:
    """Serves the blobs that it is told to offer and fetches those that it is told to fetch,
    in a thread of its own.

    Puts Fetched, FetchFailed and Damaged into `inbox`. A few blobs are fetched at a time, others
    wait. An absent holder is no failure: it gives way to others, and is asked again until it
    answers or the blob is cancelled. Who asks for chunks and is none who `may_ask` gets no answer,
    and nobody gets the same ones again and again. All methods may be called from any thread; only
    `start` and `close` wait for the network.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        federation: str,
        me: str,
        store: BlobStore,
        inbox: queue.Queue[Any],
        may_ask: Callable[[str], bool] = lambda _: True,
    ):
        self.bytes_sent = 0  # of chunks
        self.bytes_received = 0
        self._federation = federation
        self._me = me
        self._store = store
        self._inbox = inbox
        self._events = EventQueue(EVENT_QUEUE)
        self._commands: deque[Callable[[], None]] = deque()
        # the control connection has the name
        client_id = f"edge-node/{federation}/{me}/data/{secrets.token_hex(8)}"
        self._mqtt = MqttClient(
            endpoint, client_id, inbox=self._events, persistent=False, keepalive=KEEPALIVE
        )
        self._mqtt.max_payload = LARGEST_PACKET
        self._requests = topics.want(federation, me, "+")
        # checksums of chunks by digest and chunk size
        self._offered: dict[tuple[str, int], list[int]] = {}
        self._offering = threading.Lock()  # while that is replaced
        self._may_ask = may_ask
        self._ignored: Counter[str] = Counter()  # requests, by asker
        self._allowances = Allowances()
        self._sends = SendQueue()
        self._jobs: dict[str, list[_Job]] = {}  # by digest
        self._slots: TransferSlots[_Job] = TransferSlots(MAX_DOWNLOADS)
        self._complained_of: set[str] = set()  # peers that sent what cannot be read
        self._closing = threading.Event()
        self._worker = threading.Thread(target=self._run, name=f"blobs of {me}", daemon=True)

    def start(self) -> None:
        """Connect and begin; BrokerError if the broker cannot be reached."""
        self._mqtt.subscribe(self._requests, qos=0)
        self._mqtt.open()
        self._worker.start()

    def close(self) -> None:
        """Stop.

        What has arrived of a blob is kept, so that a later process need not fetch it again.
        """
        self._closing.set()
        self._wake()
        if self._worker.is_alive():
            self._worker.join()
        self._mqtt.close()

    def chunk_size(self, preferred: int = CHUNK) -> int:
        """Return the bytes of a chunk: `preferred`, or what fits into the broker's packets."""
        if self._mqtt.max_packet is None:
            return preferred
        return min(preferred, self._mqtt.max_packet - CHUNK_OVERHEAD)

    def offer(self, digest: str, chunk_size: int) -> bool:
        """Serve a blob of the store to whoever asks, in chunks of this size,
        and of sizes offered before.

        In no other size: a chunk that one asker wants serves all, and nobody can have the same
        bytes sent in many ways. What is on the disk is verified now, and each chunk again when it
        is sent. Returns whether it is intact; a blob that is not is not served.
        """
        if (digest, chunk_size) in self._offered:
            return True
        checksums = self._store.checksums(digest, chunk_size)
        if checksums is None:
            return False
        with self._offering:
            self._offered = {**self._offered, (digest, chunk_size): checksums}
        return True

    def withdraw(self, digest: str) -> None:
        """Stop serving a blob."""
        with self._offering:
            self._offered = {key: sums for key, sums in self._offered.items() if key[0] != digest}

    def fetch(self, manifest: Manifest) -> None:
        """Get a blob from its holder, `manifest.node`;
        Fetched follows at once if the store has it already.

        Called again for a blob that waits because its holder was silent, it ends that disadvantage.
        """
        self._submit(partial(self._add, manifest))

    def renew_subscriptions(self) -> None:
        """Go on under the new names that blobs have since the endpoint's encryption has other
        keys.
        """
        self._submit(self._renew)

    def received(self, digest: str) -> int:
        """Return how many bytes have arrived of a blob that is being fetched."""
        return max(
            (job.download.received for job in list(self._jobs.get(digest, ())) if job.download),
            default=0,
        )

    def in_progress(self) -> list[Manifest]:
        """Return the manifests of the few blobs that are fetched at the moment;
        nothing arrives of those that wait.
        """
        return list(chain.from_iterable(list(job.manifests) for job in list(self._slots.active)))

    def cancel(self, manifest: Manifest) -> None:
        """Stop fetching a blob from this holder, and delete what has arrived of it."""
        self._submit(partial(self._cancel, manifest))

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        with suppress(queue.Full):  # then it is awake
            self._events.put_nowait(None)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._step()
            except Exception:
                log.exception("the blob transfer of %s goes on after an error", self._me)

    def _step(self) -> None:
        if self._sends:
            timeout = 0.002
        elif self._jobs:
            timeout = 0.05
        else:
            timeout = 0.5
        with suppress(queue.Empty):
            self._handle(self._events.get(timeout=timeout))
        while self._commands:
            self._commands.popleft()()
        if self._mqtt.is_connected:
            self._send()
            self._request_chunks()

    def _handle(self, event: Delivery | Connected | Disconnected | None) -> None:
        match event:
            case Connected():
                for download in self._active_downloads():
                    download.restart()
            case Disconnected():
                self._sends.clear()
            case Delivery() if topic_matches_sub(self._requests, event.topic):
                self._serve(event)
            case Delivery():
                self.bytes_received += len(event.payload)
                for job in [
                    job
                    for job in self._jobs.get(topics.blob(event.topic), ())
                    if job.topic == event.topic
                ]:
                    self._receive(job, event.payload)

    def _serve(self, request: Delivery) -> None:
        asker = topics.sender(request.topic)
        try:
            want = decode(request.payload, Want)
        except DecodeError as error:
            if self._is_first_complaint(asker):
                log.warning("%r asks for chunks in a way that cannot be read: %s", asker, error)
            return
        if not self._may_ask(asker):
            self._ignore(asker)
            return
        count = len(self._offered.get((want.digest, want.chunk_size), ()))
        if max(want.chunks) >= count or want.chunk_size > self.chunk_size(want.chunk_size):
            log.info("%r asks for chunks of %s that are not offered so", asker, want.digest)
            return
        now = time.monotonic()
        left = self._allowances.left(asker, want, count, now)
        self._allowances.spend(asker, want, self._sends.add(want, now, left))
        if not left and self._is_first_complaint(asker):
            log.warning(
                "%r has had %s %d times in %d s: it has to wait",
                asker,
                want.digest[:12],
                REPEATS,
                PERIOD,
            )

    def _ignore(self, asker: str) -> None:
        """Leave out a request of somebody without part in the federation."""
        if len(self._ignored) > MAX_COMPLAINTS:
            self._ignored.clear()
        self._ignored[asker] += 1
        if self._ignored[asker] == MAX_IGNORED and self._is_first_complaint(asker):
            log.warning("%r asks for chunks without taking part: it gets none", asker)

    def _is_first_complaint(self, peer: str) -> bool:
        """Whether a complaint about this peer is the first one; the others would fill the log."""
        new = peer not in self._complained_of and len(self._complained_of) < MAX_COMPLAINTS
        self._complained_of |= {peer} if new else set()
        return new

    def _send(self) -> None:
        while self._sends and self._mqtt.backlog < BACKLOG:
            chunk = self._sends.pop(time.monotonic())
            checksums = self._offered.get((chunk.digest, chunk.chunk_size))
            if checksums is None:
                continue
            try:
                data = self._store.read(
                    chunk.digest, chunk.number * chunk.chunk_size, chunk.chunk_size
                )
            except OSError:
                data = b""
            if zlib.crc32(data) != checksums[chunk.number]:
                # else withdrawn and removed at this moment
                if (chunk.digest, chunk.chunk_size) in self._offered:
                    self.withdraw(chunk.digest)
                    self._notify(Damaged(chunk.digest))
                continue
            topic = topics.chunks(self._federation, self._me, chunk.digest, chunk.chunk_size)
            self.bytes_sent += len(data)  # before it is: whoever has it may ask at once
            self._mqtt.publish(topic, encode_chunk(chunk.number, data), qos=0)

    def _request_chunks(self) -> None:
        self._schedule()
        now = time.monotonic()
        for download in self._active_downloads():
            if chunks := download.chunks_to_request(now):
                blob = download.manifest
                want = Want(
                    digest=blob.digest,
                    chunk_size=blob.chunk_size,
                    chunks=chunks,
                    newest=download.newest,
                )
                self._mqtt.publish(
                    topics.want(self._federation, blob.node, self._me), encode(want), qos=0
                )

    def _schedule(self) -> None:
        for job in list(self._slots.active):
            if job.download and job.download.unanswered >= MAX_UNANSWERED:
                self._slots.demote(job)
        while started := self._slots.start_next():
            try:
                self._start_job(started)
            except EdgeNodeError as error:
                self._remove(started, error)
        active = self._active_downloads()
        for download in active:
            download.window = WINDOW // len(active)

    def _active_downloads(self) -> list[Download]:
        return [job.download for job in self._slots.active if job.download]

    def _start_job(self, job: _Job) -> None:
        """Begin or resume a job."""
        if job.download:
            job.download.restart()
            return
        job.download = Download(job.blob, self._store)
        self._mqtt.subscribe(job.topic, qos=0)
        if job.download.complete:  # an earlier process received it all
            self._finish(job, job.download)

    def _receive(self, job: _Job, payload: bytes) -> None:
        if job.download is None:
            return
        try:
            index, data = decode_chunk(payload)
            job.download.receive(index, data, time.monotonic())
        except DecodeError as error:
            if self._is_first_complaint(job.blob.node):
                log.warning("a chunk from %s cannot be read: %s", job.blob.node, error)
        except EdgeNodeError as error:
            self._remove(job, error)
        else:
            self._slots.add(job)  # again, if it was demoted
            if job.download.complete:
                self._finish(job, job.download)

    def _finish(self, job: _Job, download: Download) -> None:
        try:
            download.finish()
        except PeerError as error:
            if self._may_retry(job, download):
                job.download = None
                self._slots.remove(job)
                self._slots.add(job)
            else:
                self._remove(job, error)
        except EdgeNodeError as error:
            self._remove(job, error)
        else:
            for each in list(self._jobs[job.blob.digest]):
                self._remove(each)

    def _may_retry(self, job: _Job, download: Download) -> bool:
        """Whether the wrong bytes of a blob may not be its holder's fault.

        A power cut may have torn the file of an earlier process. And where members sign their
        messages, a broker can still forge chunks: the holder must not be refused for that.
        """
        if download.resumed:
            return True
        if self._mqtt.endpoint.signer and self._is_first_complaint(job.blob.node):
            log.warning(
                "what arrives from %s is not the blob that it has signed; asking for it again",
                job.blob.node,
            )
        return self._mqtt.endpoint.signer is not None

    def _add(self, manifest: Manifest) -> None:
        if manifest.digest in self._store:
            self._notify(Fetched(manifest))
            return
        jobs = self._jobs.setdefault(manifest.digest, [])
        job = next((job for job in jobs if job.matches(manifest)), None)
        if job is None:
            topic = topics.chunks(
                self._federation, manifest.node, manifest.digest, manifest.chunk_size
            )
            jobs.append(job := _Job(manifest, topic))
        elif manifest not in job.manifests:
            job.manifests.append(manifest)
        self._slots.add(job)

    def _renew(self) -> None:
        self._mqtt.renew_subscriptions()
        for download in self._active_downloads():
            download.restart()

    def _cancel(self, manifest: Manifest) -> None:
        for job in [
            job for job in self._jobs.get(manifest.digest, ()) if job.blob.node == manifest.node
        ]:
            job.manifests.clear()
            self._remove(job)

    def _remove(self, job: _Job, error: EdgeNodeError | PeerError | None = None) -> None:
        """End a job, and notify those who wait for its blob."""
        jobs = self._jobs[job.blob.digest]
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.blob.digest]
        self._slots.remove(job)
        if job.download:
            job.download.discard()
            job.download = None
            if all(each.topic != job.topic for each in jobs):
                self._mqtt.unsubscribe(job.topic)
        for manifest in job.manifests:
            failed = FetchFailed(manifest, error) if error else Fetched(manifest)
            self._notify(failed)

    def _notify(self, outcome: Fetched | FetchFailed | Damaged) -> None:
        while not self._closing.is_set():
            with suppress(queue.Full):
                self._inbox.put(outcome, timeout=0.2)
                break
