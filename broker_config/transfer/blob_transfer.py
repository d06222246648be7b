"""Blobs on their way: what one process serves to others and fetches from them, over a connection of its own.

A holder sends a chunk to all who fetch the blob at the moment; an asker asks for what it still misses, until it has it.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from paho.mqtt.client import topic_matches_sub

from broker_config.mqtt.client import LARGEST_PACKET, Connected, Delivery, Disconnected, Endpoint, MqttClient
from broker_config.mqtt.event_queue import EventQueue
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode, decode_chunk, encode, encode_chunk
from broker_config.protocol.errors import EdgeNodeError, PeerError
from broker_config.protocol.messages import Manifest, Want
from broker_config.transfer.blob_store import BlobStore
from broker_config.transfer.download import WINDOW, Download
from broker_config.transfer.scheduler import TransferScheduler
from broker_config.transfer.send_queue import SendQueue

__all__ = ["BlobStore", "BlobTransfer", "Download", "FetchFailed", "Fetched"]

log = logging.getLogger(__name__)

CHUNK = 256 * 1024  # bytes
CHUNK_ROOM = 1024  # bytes of a packet that are not a chunk's data, at most
BACKLOG = 1 << 20  # bytes handed to the client and not yet written, at most one chunk more
EVENTS = 8 * WINDOW  # bytes of chunks and requests that wait for the worker, at most one more
AT_ONCE = 8  # blobs that are fetched at a time; the window is theirs
SILENT = 2  # requests without an answer after which a holder gives way to another
COMPLAINTS = 100  # peers that are named in the log for what they sent
KEEPALIVE = 60  # seconds: a slow line may be busy with chunks for long


class Fetched(NamedTuple):
    """The blob of `manifest` is in the store."""

    manifest: Manifest


class FetchFailed(NamedTuple):
    """The blob of `manifest` cannot be had, and why; the holder's fault, or ours (a full disk, say)."""

    manifest: Manifest
    reason: str
    peers_fault: bool


class _Job:
    """A blob that is fetched or waits for that, and all manifests that promise it in the same way."""

    def __init__(self, manifest: Manifest, topic: str):
        self.blob = manifest
        self.manifests = [manifest]
        self.topic = topic
        self.fetch: Download | None = None  # from its first turn on

    def is_promised_by(self, manifest: Manifest) -> bool:
        """Whether it is this blob, from this holder, in such chunks."""
        fields = ("node", "digest", "size", "chunk_size")
        return all(getattr(manifest, field) == getattr(self.blob, field) for field in fields)


class BlobTransfer:
    """Serves the blobs that it is told to offer and fetches those that it is told to, in a thread of its own.

    Puts Fetched and FetchFailed into `inbox`. A few blobs are fetched at a time, others wait for their turn. A holder
    that is away is no failure: it gives way to others, and is asked again until it answers or the blob is cancelled.
    All methods may be called from any thread; only `start` and `close` wait for the network.
    """

    def __init__(self, endpoint: Endpoint, federation: str, me: str, store: BlobStore, inbox: queue.Queue[Any]):
        self.bytes_sent = 0  # of chunks
        self.bytes_received = 0
        self._federation = federation
        self._me = me
        self._store = store
        self._inbox = inbox
        self._events = EventQueue(EVENTS)
        self._commands: deque[Callable[[], None]] = deque()
        self._mqtt = MqttClient(
            endpoint, f"edge-node/{federation}/{me}/data", inbox=self._events, persistent=False, keepalive=KEEPALIVE
        )
        self._mqtt.longest = LARGEST_PACKET
        self._requests = topics.want(federation, me, "+")
        self._offered: dict[tuple[str, int], int] = {}  # bytes by digest and chunk size
        self._sends = SendQueue()
        self._jobs: dict[str, list[_Job]] = {}  # by digest
        self._turns: TransferScheduler[_Job] = TransferScheduler(AT_ONCE)
        self._named: set[str] = set()  # peers that sent what cannot be read
        self._closing = threading.Event()
        self._worker = threading.Thread(target=self._run, name=f"blobs of {me}", daemon=True)

    def start(self) -> None:
        """Connect and begin; BrokerError if the broker cannot be reached."""
        self._mqtt.subscribe(self._requests, qos=0)
        self._mqtt.open()
        self._worker.start()

    def close(self) -> None:
        """Stop. What has arrived of a blob is kept, so that a later process need not fetch it again."""
        self._closing.set()
        self._wake()
        if self._worker.is_alive():
            self._worker.join()
        self._mqtt.close()

    def chunk_size(self, preferred: int = CHUNK) -> int:
        """Return the bytes of a chunk: `preferred`, or what fits into the broker's packets."""
        if self._mqtt.max_packet is None:
            return preferred
        return min(preferred, self._mqtt.max_packet - CHUNK_ROOM)

    def offer(self, digest: str, chunk_size: int) -> None:
        """Serve a blob of the store to whoever asks, in chunks of this size, and of others that it was offered in.

        Of no other size: what one asks for serves all, and nobody can have the same bytes sent in a thousand ways.
        """
        size = self._store.path(digest).stat().st_size
        self._offered = {**self._offered, (digest, chunk_size): size}

    def withdraw(self, digest: str) -> None:
        """Serve a blob no longer."""
        self._offered = {key: size for key, size in self._offered.items() if key[0] != digest}

    def fetch(self, manifest: Manifest) -> None:
        """Get a blob from its holder, `manifest.node`; Fetched follows at once if the store has it already.

        Said again of a blob that waits because its holder was silent, it waits no longer than others.
        """
        self._order(partial(self._accept, manifest))

    def received(self, digest: str) -> int:
        """Return how many bytes there are of a blob that is being fetched."""
        return max((job.fetch.received for job in list(self._jobs.get(digest, ())) if job.fetch), default=0)

    def cancel(self, manifest: Manifest) -> None:
        """Fetch a blob no longer from this holder, and forget what has arrived of it."""
        self._order(partial(self._abandon, manifest))

    def _order(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        with suppress(queue.Full):  # then it is awake
            self._events.put_nowait(None)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception:
                log.exception("the blob transfer of %s goes on after an error", self._me)

    def _turn(self) -> None:
        timeout = 0.002 if self._sends else 0.05 if self._jobs else 0.5
        with suppress(queue.Empty):
            self._take(self._events.get(timeout=timeout))
        while self._commands:
            self._commands.popleft()()
        if self._mqtt.is_connected:
            self._send()
            self._ask()

    def _take(self, event: Delivery | Connected | Disconnected | None) -> None:
        match event:
            case Connected():
                for fetch in self._under_way():
                    fetch.restart()
            case Disconnected():
                self._sends.clear()
            case Delivery() if topic_matches_sub(self._requests, event.topic):
                self._serve(event)
            case Delivery():
                self.bytes_received += len(event.payload)
                for job in [job for job in self._jobs.get(topics.blob(event.topic), ()) if job.topic == event.topic]:
                    self._receive(job, event.payload)

    def _serve(self, request: Delivery) -> None:
        asker = topics.sender(request.topic)
        try:
            want = decode(request.payload, Want)
        except DecodeError as error:
            if self._is_first(asker):
                log.warning("%r asks for chunks in a way that cannot be read: %s", asker, error)
            return
        size = self._offered.get((want.digest, want.chunk_size), 0)
        if max(want.chunks) * want.chunk_size >= size or want.chunk_size > self.chunk_size(want.chunk_size):
            log.info("%r asks for chunks of %s that are not offered so", asker, want.digest)
        else:
            self._sends.add(want, time.monotonic())

    def _is_first(self, peer: str) -> bool:
        """Whether a complaint about this peer is the first one; the others would fill the log."""
        new = peer not in self._named and len(self._named) < COMPLAINTS
        self._named |= {peer} if new else set()
        return new

    def _send(self) -> None:
        while self._sends and self._mqtt.backlog < BACKLOG:
            piece = self._sends.pop(time.monotonic())
            if (piece.digest, piece.chunk_size) not in self._offered:
                continue
            try:
                data = self._store.read(piece.digest, piece.number * piece.chunk_size, piece.chunk_size)
            except FileNotFoundError:  # withdrawn and removed at this moment
                continue
            topic = topics.chunks(self._federation, self._me, piece.digest, piece.chunk_size)
            self._mqtt.publish(topic, encode_chunk(piece.number, data), qos=0)
            self.bytes_sent += len(data)

    def _ask(self) -> None:
        self._take_turns()
        now = time.monotonic()
        for fetch in self._under_way():
            if chunks := fetch.wants(now):
                blob = fetch.manifest
                want = Want(digest=blob.digest, chunk_size=blob.chunk_size, chunks=chunks, newest=fetch.newest)
                self._mqtt.publish(topics.want(self._federation, blob.node, self._me), encode(want), qos=0)

    def _take_turns(self) -> None:
        for job in list(self._turns.served):
            if job.fetch and job.fetch.unanswered >= SILENT:
                self._turns.give_way(job)
        while next_one := self._turns.next():
            try:
                self._begin(next_one)
            except EdgeNodeError as error:
                self._end(next_one, error)
        under_way = self._under_way()
        for fetch in under_way:
            fetch.window = WINDOW // len(under_way)

    def _under_way(self) -> list[Download]:
        return [job.fetch for job in self._turns.served if job.fetch]

    def _begin(self, job: _Job) -> None:
        """It is the job's turn, for the first time or again."""
        if job.fetch:
            job.fetch.restart()
            return
        job.fetch = Download(job.blob, self._store)
        self._mqtt.subscribe(job.topic, qos=0)
        if job.fetch.complete:  # an earlier process received it all
            self._finish(job, job.fetch)

    def _receive(self, job: _Job, payload: bytes) -> None:
        if job.fetch is None:
            return
        try:
            index, data = decode_chunk(payload)
            job.fetch.receive(index, data, time.monotonic())
        except DecodeError as error:
            if self._is_first(job.blob.node):
                log.warning("a chunk from %s cannot be read: %s", job.blob.node, error)
        except EdgeNodeError as error:
            self._end(job, error)
        else:
            self._turns.join(job)  # if it was silent
            if job.fetch.complete:
                self._finish(job, job.fetch)

    def _finish(self, job: _Job, fetch: Download) -> None:
        try:
            fetch.finish()
        except PeerError as error:
            if self._may_be_innocent(job, fetch):  # all over again
                job.fetch = None
                self._turns.leave(job)
                self._turns.join(job)
            else:
                self._end(job, error)
        except EdgeNodeError as error:
            self._end(job, error)
        else:
            for each in list(self._jobs[job.blob.digest]):
                self._end(each)

    def _may_be_innocent(self, job: _Job, fetch: Download) -> bool:
        """Whether others than the holder may have given a blob the wrong bytes.

        A power cut may have torn what an earlier process left. And where members sign what they say, chunks are what a
        broker can forge: it must not have their holder refused for that.
        """
        if fetch.resumed:
            return True
        if self._mqtt.endpoint.signer and self._is_first(job.blob.node):
            log.warning("what arrives from %s is not the blob that it has signed; asking for it again", job.blob.node)
        return self._mqtt.endpoint.signer is not None

    def _accept(self, manifest: Manifest) -> None:
        if manifest.digest in self._store:
            self._tell(Fetched(manifest))
            return
        jobs = self._jobs.setdefault(manifest.digest, [])
        job = next((job for job in jobs if job.is_promised_by(manifest)), None)
        if job is None:
            topic = topics.chunks(self._federation, manifest.node, manifest.digest, manifest.chunk_size)
            jobs.append(job := _Job(manifest, topic))
        elif manifest not in job.manifests:
            job.manifests.append(manifest)
        self._turns.join(job)

    def _abandon(self, manifest: Manifest) -> None:
        for job in [job for job in self._jobs.get(manifest.digest, ()) if job.blob.node == manifest.node]:
            job.manifests.clear()
            self._end(job)

    def _end(self, job: _Job, error: Exception | None = None) -> None:
        """Fetch a blob no longer, and tell those who wait for it."""
        jobs = self._jobs[job.blob.digest]
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.blob.digest]
        self._turns.leave(job)
        if job.fetch:
            job.fetch.discard()
            job.fetch = None
            if all(each.topic != job.topic for each in jobs):
                self._mqtt.unsubscribe(job.topic)
        for manifest in job.manifests:
            self._tell(FetchFailed(manifest, str(error), isinstance(error, PeerError)) if error else Fetched(manifest))

    def _tell(self, news: Fetched | FetchFailed) -> None:
        while not self._closing.is_set():
            with suppress(queue.Full):
                self._inbox.put(news, timeout=0.2)
                break
