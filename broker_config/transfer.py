"""Blobs on their way: what one process serves to others and fetches from them, over a connection of its own.

A holder sends a chunk to all who fetch the blob at the moment; an asker asks for what it still misses, until it has it.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from paho.mqtt.client import topic_matches_sub

from broker_config import topics
from broker_config.blobs import BlobStore
from broker_config.codec import INDEX_BYTES, MAX_MESSAGE, DecodeError, decode, decode_chunk, encode, encode_chunk
from broker_config.errors import EdgeNodeError, PeerError
from broker_config.fetch import WINDOW, Fetch
from broker_config.link import Delivery, Endpoint, Link, LinkDown, LinkUp
from broker_config.messages import Manifest, Want

__all__ = ["BlobStore", "Courier", "Fetch", "FetchFailed", "Fetched", "SendQueue"]

log = logging.getLogger(__name__)

CHUNK = 256 * 1024  # bytes
CHUNK_ROOM = 1024  # bytes of a packet that are not a chunk's data, at most
BACKLOG = 1 << 20  # bytes handed to the link and not yet written, at most one chunk more
EVENTS = 256  # chunks and requests that wait for the worker
SERVED_AT_ONCE = 16_384  # chunks that wait to be sent; whoever asks for more asks again later
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


class Piece(NamedTuple):
    """One chunk of a blob."""

    digest: str
    chunk_size: int
    number: int


class SendQueue:
    """Chunks to send, in the order in which they were asked for; asked for by several, each is sent once."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[Piece, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, want: Want) -> None:
        """Note what was asked for."""
        for index in want.chunks[: SERVED_AT_ONCE - len(self)]:
            self._pieces.setdefault(Piece(want.digest, want.chunk_size, index))

    def pop(self) -> Piece:
        """Return the next chunk to send; KeyError if there is none."""
        return self._pieces.popitem(last=False)[0]

    def clear(self) -> None:
        """Send nothing of what was asked for so far."""
        self._pieces.clear()


class _Job:
    """A blob that is being fetched, and all manifests that promise it from this holder."""

    def __init__(self, manifest: Manifest, store: BlobStore, topic: str):
        self.fetch = Fetch(manifest, store)
        self.manifests = [manifest]
        self.topic = topic


class Courier:
    """Serves the blobs that it is told to offer and fetches those that it is told to, in a thread of its own.

    Puts Fetched and FetchFailed into `inbox`. A holder that is away is no failure: it is asked until it answers or the
    blob is cancelled. All methods may be called from any thread; only `start` and `close` wait for the network.
    """

    def __init__(self, endpoint: Endpoint, federation: str, me: str, store: BlobStore, inbox: queue.Queue[Any]):
        self.bytes_sent = 0  # of chunks
        self.bytes_received = 0
        self._federation = federation
        self._me = me
        self._store = store
        self._inbox = inbox
        self._events: queue.Queue[Delivery | LinkUp | LinkDown | None] = queue.Queue(EVENTS)
        self._commands: deque[Callable[[], None]] = deque()
        self._link = Link(
            endpoint, f"edge-node/{federation}/{me}/data", inbox=self._events, persistent=False, keepalive=KEEPALIVE
        )
        self._requests = topics.want(federation, me, "+")
        self._offered: dict[str, int] = {}  # digest -> bytes
        self._sends = SendQueue()
        self._jobs: dict[tuple[str, str, int, int], _Job] = {}
        self._named: set[str] = set()  # peers that sent what cannot be read
        self._closing = threading.Event()
        self._worker = threading.Thread(target=self._run, name=f"courier of {me}", daemon=True)

    def start(self) -> None:
        """Connect and begin; LinkError if the broker cannot be reached."""
        self._link.subscribe(self._requests, qos=0)
        self._link.open()
        self._worker.start()

    def close(self) -> None:
        """Stop. What has arrived of a blob is kept, so that a later process need not fetch it again."""
        self._closing.set()
        self._wake()
        if self._worker.is_alive():
            self._worker.join()
        self._link.close()
        for job in self._jobs.values():
            job.fetch.close()

    def chunk_size(self, preferred: int = CHUNK) -> int:
        """Return the bytes of a chunk: `preferred`, or what fits into the broker's packets."""
        if self._link.max_packet is None:
            return preferred
        return min(preferred, self._link.max_packet - CHUNK_ROOM)

    def offer(self, digest: str) -> None:
        """Serve a blob of the store to whoever asks."""
        self._offered[digest] = self._store.path(digest).stat().st_size

    def withdraw(self, digest: str) -> None:
        """Serve a blob no longer."""
        self._offered.pop(digest, None)

    def fetch(self, manifest: Manifest) -> None:
        """Get a blob from its holder, `manifest.node`; Fetched follows at once if the store has it already."""
        self._order(partial(self._begin, manifest))

    def received(self, digest: str) -> int:
        """Return how many bytes there are of a blob that is being fetched."""
        jobs = list(self._jobs.values())
        return max((job.fetch.received for job in jobs if job.fetch.manifest.digest == digest), default=0)

    def cancel(self, digest: str) -> None:
        """Fetch a blob no longer, and forget what has arrived of it."""
        self._order(partial(self._abandon, digest))

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
                log.exception("the courier of %s goes on after an error", self._me)

    def _turn(self) -> None:
        timeout = 0.002 if self._sends else 0.05 if self._jobs else 0.5
        with suppress(queue.Empty):
            self._take(self._events.get(timeout=timeout))
        while self._commands:
            self._commands.popleft()()
        if self._link.connected:
            self._send()
            self._ask()

    def _take(self, event: Delivery | LinkUp | LinkDown | None) -> None:
        match event:
            case LinkUp():
                for job in self._jobs.values():
                    job.fetch.restart()
            case LinkDown():
                self._sends.clear()
            case Delivery() if topic_matches_sub(self._requests, event.topic):
                self._serve(event)
            case Delivery():
                self.bytes_received += len(event.payload)
                for job in [job for job in self._jobs.values() if job.topic == event.topic]:
                    self._receive(job, event.payload)

    def _serve(self, request: Delivery) -> None:
        asker = topics.sender(request.topic)
        try:
            want = decode(request.payload, Want)
        except DecodeError as error:
            if self._is_first(asker):
                log.warning("%r asks for chunks in a way that cannot be read: %s", asker, error)
            return
        size = self._offered.get(want.digest, 0)
        if max(want.chunks) * want.chunk_size >= size or want.chunk_size > self.chunk_size(want.chunk_size):
            log.info("%r asks for chunks of %s that are not offered", asker, want.digest)
        else:
            self._sends.add(want)

    def _is_first(self, peer: str) -> bool:
        """Whether a complaint about this peer is the first one; the others would fill the log."""
        new = peer not in self._named and len(self._named) < COMPLAINTS
        self._named |= {peer} if new else set()
        return new

    def _send(self) -> None:
        while self._sends and self._link.backlog < BACKLOG:
            piece = self._sends.pop()
            if piece.digest not in self._offered:
                continue
            try:
                data = self._store.read(piece.digest, piece.number * piece.chunk_size, piece.chunk_size)
            except FileNotFoundError:  # withdrawn and removed at this moment
                continue
            topic = topics.chunks(self._federation, self._me, piece.digest, piece.chunk_size)
            self._link.publish(topic, encode_chunk(piece.number, data), qos=0)
            self.bytes_sent += len(data)

    def _ask(self) -> None:
        now = time.monotonic()
        for job in self._jobs.values():
            manifest = job.fetch.manifest
            if chunks := job.fetch.wants(now):
                want = Want(digest=manifest.digest, chunk_size=manifest.chunk_size, chunks=chunks)
                topic = topics.want(self._federation, manifest.node, self._me)
                self._link.publish(topic, encode(want), qos=0)

    def _receive(self, job: _Job, payload: bytes) -> None:
        try:
            index, data = decode_chunk(payload)
            job.fetch.receive(index, data, time.monotonic())
        except DecodeError as error:
            if self._is_first(holder := job.fetch.manifest.node):
                log.warning("a chunk from %s cannot be read: %s", holder, error)
        except EdgeNodeError as error:
            self._end(job, error)
        else:
            if job.fetch.complete:
                self._finish(job)

    def _finish(self, job: _Job) -> None:
        manifest = job.fetch.manifest
        try:
            try:
                job.fetch.finish()
            except PeerError:
                if not job.fetch.resumed:
                    raise
                job.fetch = Fetch(manifest, self._store)  # a power cut may have torn what an earlier process left
                return
        except (EdgeNodeError, PeerError) as error:
            self._end(job, error)
            return
        for each in [each for each in self._jobs.values() if each.fetch.manifest.digest == manifest.digest]:
            self._end(each)

    def _begin(self, manifest: Manifest) -> None:
        if manifest.digest in self._store:
            self._tell(Fetched(manifest))
            return
        key = (manifest.node, manifest.digest, manifest.size, manifest.chunk_size)
        job = self._jobs.get(key)
        if job is None:
            topic = topics.chunks(self._federation, manifest.node, manifest.digest, manifest.chunk_size)
            try:
                job = self._jobs[key] = _Job(manifest, self._store, topic)
            except EdgeNodeError as error:
                self._tell(FetchFailed(manifest, str(error), peers_fault=False))
                return
            self._link.subscribe(topic, qos=0)
            self._share_window()
            if job.fetch.complete:  # an earlier process received it all
                self._finish(job)
        elif manifest not in job.manifests:
            job.manifests.append(manifest)

    def _abandon(self, digest: str) -> None:
        for job in [job for job in self._jobs.values() if job.fetch.manifest.digest == digest]:
            job.manifests.clear()
            self._end(job)

    def _end(self, job: _Job, error: Exception | None = None) -> None:
        """Fetch a blob no longer, and tell those who wait for it."""
        job.fetch.discard()
        self._jobs = {key: each for key, each in self._jobs.items() if each is not job}
        if all(each.topic != job.topic for each in self._jobs.values()):
            self._link.unsubscribe(job.topic)
        self._share_window()
        for manifest in job.manifests:
            self._tell(FetchFailed(manifest, str(error), isinstance(error, PeerError)) if error else Fetched(manifest))

    def _share_window(self) -> None:
        for job in self._jobs.values():
            job.fetch.window = WINDOW // len(self._jobs)
        chunk_sizes = (job.fetch.manifest.chunk_size for job in self._jobs.values())
        self._link.longest = max(MAX_MESSAGE, INDEX_BYTES + max(chunk_sizes, default=0))

    def _tell(self, news: Fetched | FetchFailed) -> None:
        while not self._closing.is_set():
            with suppress(queue.Full):
                self._inbox.put(news, timeout=0.2)
                break
