"""Hostile frames against all that reads frames:
`python -m tests.support.fuzz --frames 100000` prints the outcomes.

A frame may be refused, by DecodeError or PeerError; nothing else may come of it: no other
exception, no hang, no growth of memory or disk. The seed is printed: with it and the same code the
same frames come again.
"""

import argparse
import faulthandler
import queue
import random
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.client import Delivery
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import (
    MAX_MESSAGE,
    DecodeError,
    decode_any,
    decode_chunk,
    encode,
    encoded_size,
    read_tensors,
)
from broker_config.protocol.errors import PeerError
from broker_config.protocol.messages import (
    AnyMessage,
    Contribution,
    Hello,
    Manifest,
    RoundState,
    Want,
)
from broker_config.transfer.blob_store import BlobStore
from broker_config.transfer.blob_transfer import BlobTransfer, Download, Fetched, FetchFailed
from broker_config.transfer.send_queue import MAX_QUEUED, SendQueue
from tests.support.frame_mutation import SENT, Frame, Mutator, is_message, record, small_encoder
from tests.support.live_attack import attack_federation, check
from tests.support.waiting import PATIENCE
from trainer.federation.server.coordinator.process import _Coordinator
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Participation, Request, draft
from trainer.progress import NodeRefused

# bytes that a target may add to the process's peak, once it has warmed up: ten times what any does
GROWTH = 1 << 30
WARM = 0.2  # of a target's frames, after which memory must be level
# of all frames
SHARES = {"messages": 8, "tensors": 2, "receiver": 1, "holder": 4, "transfer": 5, "coordinator": 5}
LARGEST = 300_000  # bytes that a manifest may promise here: who fetches has a limit


class Target(Protocol):
    """What reads frames."""

    def feed(self, mutator: Mutator) -> bool:
        """Take one frame in; False if it was refused. Any exception is a bug."""
        ...


def understood(payload: bytes) -> AnyMessage | None:
    """The message in a frame, or None if it is refused."""
    try:
        return decode_any(payload)
    except DecodeError as refusal:
        check_words(str(refusal))
        return None


def check_words(reason: str) -> None:
    """A reason fits into a Refusal and does nothing to a terminal."""
    assert len(reason) < 1000, len(reason)
    assert reason.isprintable(), reason


class Messages:
    """The decoder: what it lets through is a message, which comes back as it was."""

    def feed(self, mutator: Mutator) -> bool:
        payload = mutator.frame().payload
        message = understood(payload)
        if message is not None and len(payload) < MAX_MESSAGE - 1000:
            assert decode_any(encode(message)) == message
        return message is not None


class Tensors:
    """The reader of contributions: what it lets through has the names and shapes expected,
    and is finite.
    """

    def __init__(self, folder: Path):
        self._path = folder / "tensors"

    def feed(self, mutator: Mutator) -> bool:
        self._path.write_bytes(mutator.blob())
        try:
            shapes = {name: value.shape for name, value in read_tensors(self._path, SENT)}
        except DecodeError as refusal:
            check_words(str(refusal))
            return False
        assert shapes == {name: spec.shape for name, spec in SENT.items()}
        assert self._path.stat().st_size <= encoded_size(SENT)
        return True


class Receiver:
    """One blob after another that is being received: the file stays as long as promised."""

    def __init__(self, folder: Path, frames: Sequence[Frame]):
        self._store = BlobStore(folder / "received")
        self._manifests = [
            manifest for frame in frames if (manifest := manifest_in(decode_any(frame.payload)))
        ]

    def feed(self, mutator: Mutator) -> bool:
        random = mutator.random
        manifest = self._manifests[0]
        if (other := manifest_in(understood(mutator.message().payload))) and other.size <= LARGEST:
            manifest = other
        download = Download(manifest, self._store)
        try:
            for index in (*download.chunks_to_request(0), *download.chunks_to_request(1e9), None):
                taken = download.received
                number, data = (
                    index,
                    bytes(random.choice((0, 1, manifest.chunk_size, manifest.size))),
                )
                if number is None:
                    number, data = decode_chunk(mutator.chunk().payload)
                download.receive(number, data, random.choice((-1.0, 0.0, 1e9)))
                assert taken <= download.received <= manifest.size
            if download.complete:
                download.finish()
        except (DecodeError, PeerError):
            return False
        finally:
            assert (
                sum(file.stat().st_size for file in self._store.incoming.iterdir()) <= LARGEST * 2
            )
            download.discard()
        return True


class Holder:
    """What has been asked for and not yet been sent."""

    def __init__(self) -> None:
        self._queue, self._now = SendQueue(), 0.0

    def feed(self, mutator: Mutator) -> bool:
        want = understood(mutator.message().payload)
        if not isinstance(want, Want):
            return False
        self._now += mutator.random.random()
        self._queue.add(want, self._now)
        assert len(self._queue) <= MAX_QUEUED
        if mutator.random.random() < 0.1:
            self._queue.pop(self._now)
        return True


class BlobTransfers:
    """A transfer on a real broker, stepped by hand: hostile Wants and chunks come in,
    hostile manifests are fetched.
    """

    def __init__(self, folder: Path, url: str):
        self._folder, self._inbox = folder / "transfer", queue.Queue[Any]()
        store = BlobStore(self._folder)
        self._transfer = BlobTransfer(
            Endpoint.parse(url), "default", topics.COORDINATOR, store, self._inbox
        )
        self._transfer.offer(store.put(bytes(LARGEST))[0], 65_536)
        self._transfer._mqtt.open()
        self._manifests: list[Manifest] = []

    def feed(self, mutator: Mutator) -> bool:
        transfer, frame = self._transfer, mutator.frame()
        message = understood(frame.payload)
        if (manifest := manifest_in(message)) and manifest.size <= LARGEST:
            transfer.fetch(manifest)
            self._manifests.append(manifest)
        if len(self._manifests) > 20:
            transfer.cancel(self._manifests.pop(0))
        topic = (
            frame.topic
            if "/chunks/" in frame.topic
            else topics.want("default", topics.COORDINATOR, "ü")
        )
        transfer._events.put(Delivery(transfer._mqtt, topic, frame.payload, False, 1, 0))
        while not transfer._events.empty() or transfer._commands:
            transfer._step()
        while not self._inbox.empty():
            assert isinstance(self._inbox.get(), Fetched | FetchFailed)
        assert (
            sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
            < 30 * LARGEST
        )
        return message is not None or not is_message(frame)

    def close(self) -> None:
        self._transfer.close()


class Coordinators:
    """Coordinators, one after the other, turned by hand:
    members and strangers say hostile things to them.
    """

    LIFE = 2000  # frames

    def __init__(self, folder: Path, url: str):
        self._folder, self._url = folder / "coordinators", url
        self._stack = ExitStack()
        self._frames = 0
        self._begin()

    def _begin(self) -> None:
        self._stack.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ledger = self._stack.enter_context(Ledger(self._folder))
        request = Request("fedavg", model="small", rounds=3)
        spec, broadcast = draft(
            request,
            federation="default",
            classes=("a", "b"),
            nodes=1000,
            participation=Participation(quorum=3),
            encoder=small_encoder(),
        )
        self._ledger.begin_or_continue(spec, broadcast, new=True)
        told: list[object] = []
        endpoint = Endpoint.parse(self._url)
        self._coordinator = _Coordinator(self._ledger, endpoint, told.append, 0, has_ended=False)
        self._stack.callback(self._coordinator.close)
        self._told = told
        self._coordinator._connection.open()
        self._coordinator._transfer.start()

    def feed(self, mutator: Mutator) -> bool:
        """Whether the frame was taken in without a complaint."""
        if self._frames % self.LIFE == self.LIFE - 1:
            self._begin()
        self._frames += 1
        coordinator, random = self._coordinator, mutator.random
        node = f"node-{self._frames // 20}"
        topic = f"edge-node/v1/default/nodes/{node}/{random.choice(('up', 'up', 'presence'))}"
        payload = random.choice((self._mutated, self._mutated, self._hello))(mutator, node)
        before = len(self._told)
        coordinator._handle(Delivery(coordinator._connection.mqtt, topic, payload, False, 1, 0))
        coordinator._tick()
        while not coordinator._inbox.empty():
            coordinator._handle(coordinator._inbox.get())
        told = self._told[before:]
        assert len(told) < 20, told
        assert len(list(coordinator._uploads)) < self.LIFE
        return not any(isinstance(event, NodeRefused) for event in told)

    def _hello(self, _: Mutator, node: str) -> bytes:
        session = self._coordinator._membership.session(node) or "0" * 16
        return encode(Hello(session=session, run=self._ledger.spec.run, software=""))

    def _mutated(self, mutator: Mutator, node: str) -> bytes:
        session = self._coordinator._membership.session(node) or "0" * 16
        return mutator.current(
            mutator.message().payload,
            run=self._ledger.spec.run,
            session=session,
            node=node,
            round=self._coordinator.round,
            size=1000,
        )

    def close(self) -> None:
        self._stack.close()


def manifest_in(message: AnyMessage | None) -> Manifest | None:
    """What a message offers."""
    match message:
        case Contribution(blob=manifest) | RoundState(broadcast=manifest):
            return manifest
        case _:
            return None


def bombard(name: str, feed: Callable[[], bool], frames: int) -> str:
    """Feed a target so often; AssertionError if it grows, the end if it hangs.

    Returns a line about it.
    """
    fates: Counter[bool] = Counter()
    started, slowest, level = time.monotonic(), 0.0, 0
    for number in range(frames):
        if number % 1000 == 0:
            faulthandler.dump_traceback_later(PATIENCE, exit=True)  # one of a thousand hangs
        if number <= frames * WARM:
            level = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = time.monotonic()
        fates[feed()] += 1
        slowest = max(slowest, time.monotonic() - before)
    faulthandler.cancel_dump_traceback_later()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - level) * 1024
    assert grown < GROWTH, f"{name}: memory grew by {grown >> 20} MiB"
    seconds = time.monotonic() - started
    return (
        f"{name:10} {frames:8,} frames in {seconds:5.1f} s, {fates[False]:8,} refused, "
        f"slowest {1000 * slowest:6.1f} ms, memory +{grown / 2**20:.1f} MiB"
    )


@contextmanager
def everything(folder: Path) -> Iterator[tuple[list[Frame], dict[str, Target]]]:
    """The frames of a real federation, and all that reads frames, by name."""
    frames = record(folder / "recorded")
    messages = [frame for frame in frames if is_message(frame)]
    with (
        start_broker(folder / "broker", kind="mosquitto") as broker,
        closing(BlobTransfers(folder, broker.url)) as transfer,
        closing(Coordinators(folder, broker.url)) as coordinator,
    ):
        yield (
            frames,
            {
                "messages": Messages(),
                "tensors": Tensors(folder),
                "receiver": Receiver(folder, messages),
                "holder": Holder(),
                "transfer": transfer,
                "coordinator": coordinator,
            },
        )


def main() -> None:
    """Bombard all that reads frames, then a live coordinator."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument(
        "--live", type=int, default=20_000, help="frames that a live coordinator gets"
    )
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as scratch, everything(Path(scratch)) as (frames, targets):
        for name, target in targets.items():
            mutator = Mutator(frames, random.Random(f"{arguments.seed} {name}"))
            count = -(-arguments.frames * SHARES[name] // sum(SHARES.values()))
            print(bombard(name, partial(target.feed, mutator), count), flush=True)
        mutator = Mutator(frames, random.Random(f"{arguments.seed} live"))
        peace, war = (
            attack_federation(Path(scratch) / str(count), mutator, count)
            for count in (0, arguments.live)
        )
        print(f"live coordinator {check(war, peace)}")


if __name__ == "__main__":
    main()
