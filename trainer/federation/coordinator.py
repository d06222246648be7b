"""The coordinator: MQTT, clock and disk around the round's state machine and the exact sums."""

import contextlib
import queue
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from broker_config import topics
from broker_config.codec import DecodeError, decode, decode_any, encode, encode_tensors, encoded_size, read_tensors
from broker_config.errors import EdgeNodeError, PeerError, UsageError
from broker_config.link import Delivery, Endpoint, Link, LinkDown, LinkUp, probe
from broker_config.messages import (
    Accepted,
    AnyMessage,
    Contribution,
    Finished,
    Hello,
    Manifest,
    Presence,
    Refusal,
    RoundState,
    Spec,
    Stage,
    Telemetry,
    Welcome,
)
from broker_config.transfer import BlobStore, Courier, Fetched, FetchFailed
from trainer import progress
from trainer.federation import round as rounds
from trainer.federation.aggregate import FixedPointSum
from trainer.federation.journal import Journal
from trainer.methods import make
from trainer.tree import Arrays, pick

DEFAULT_CHUNK = 256 * 1024
_INBOX = 4096  # events; beyond that the broker keeps them


class Outcome(NamedTuple):
    """What a finished federation leaves."""

    broadcast: Arrays  # after the last round
    bytes_up: int
    bytes_down: int
    seconds: float


def coordinate(
    spec: Spec,
    broadcast: Arrays,
    endpoint: Endpoint,
    folder: Path,
    report: progress.Report,
    *,
    chunk_size: int = DEFAULT_CHUNK,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome | None:
    """Run a federation to its end; None when `stop` said to end it before.

    Raises:
        LinkError: the broker cannot be reached.
        UsageError: the federation is already coordinated on this broker.
        EdgeNodeError: the state folder cannot be written.
    """
    _check_unclaimed(endpoint, spec.federation)
    coordinator = _Coordinator(spec, broadcast, endpoint, folder, report, chunk_size)
    try:
        return coordinator.run(stop)
    except EdgeNodeError as error:
        coordinator.abort(error.what)
        raise
    finally:
        coordinator.close()


def _check_unclaimed(endpoint: Endpoint, federation: str) -> None:
    topic = topics.presence(federation, topics.COORDINATOR)
    for payload in probe(endpoint, [topic], wait=1.0).values():
        with contextlib.suppress(DecodeError):  # what cannot be read is nobody's presence; ours replaces it
            if decode(payload, Presence).online:
                raise UsageError(
                    f"federation {federation!r} already has a coordinator on {endpoint}",
                    "stop that one, or choose another name with --federation "
                    "(after a crash the broker notices within a minute)",
                )


class _Coordinator:
    def __init__(
        self,
        spec: Spec,
        broadcast: Arrays,
        endpoint: Endpoint,
        folder: Path,
        report: progress.Report,
        chunk_size: int,
    ):
        self._spec, self._broadcast, self._report, self._chunk_size = spec, broadcast, report, chunk_size
        self._method = make(spec.method, spec.training, spec.options)
        self._sent = pick(spec.tensors, spec.sends)
        self._largest = encoded_size(self._sent) if self._sent else 0
        self._journal = Journal(folder)
        self._store = BlobStore(folder / "blobs")
        self._state = rounds.Federation(rounds.Plan(spec.nodes, spec.quorum, spec.rounds))
        self._sessions: dict[str, str] = {}  # of the nodes that take part
        self._admitted: set[str] = set()  # names that hold a place; as many contributions a round can be summed
        self._unfinished: set[str] = set()  # nodes whose personal model is not yet on their disk
        self._arriving: dict[str, Contribution] = {}  # whose blob is under way, by node
        self._started = time.monotonic()

        self._session = secrets.token_hex(8)
        self._inbox: queue.Queue[object] = queue.Queue(_INBOX)
        self._presence_topic = topics.presence(spec.federation, topics.COORDINATOR)
        will = encode(Presence(session=self._session, online=False))
        self._link = Link(
            endpoint,
            f"edge-node/{spec.federation}/{topics.COORDINATOR}",
            inbox=self._inbox,
            persistent=True,
            will=(self._presence_topic, will),
        )
        self._courier = Courier(endpoint, spec.federation, topics.COORDINATOR, self._store, self._inbox)
        self._rounds = progress.Rounds(report, lambda: (self._courier.bytes_received, self._courier.bytes_sent))
        self._throttle = progress.Throttle(report)

    def run(self, stop: Callable[[], bool]) -> Outcome | None:
        self._journal.begin(self._spec)
        self._link.open()
        self._courier.start()
        self._link.subscribe(topics.presence(self._spec.federation, "+"), topics.up(self._spec.federation, "+"))
        self._handle(self._inbox.get())  # LinkUp: what is retained of an earlier run is replaced
        self._link.flush(5)
        spec = self._spec
        self._report(progress.Gathering(federation=spec.federation, run=spec.run, nodes=spec.nodes, rounds=spec.rounds))
        while self._state.status is not rounds.Status.FINISHED or self._unfinished:
            if stop():
                self.abort("the coordinator was stopped by its operator")
                return None
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=0.2))
            for node, message in self._arriving.items():
                self._tell(node, "sending", message.blob)
        outcome = Outcome(
            self._broadcast, self._courier.bytes_received, self._courier.bytes_sent, time.monotonic() - self._started
        )
        self._report(
            progress.FederationFinished(
                rounds=spec.rounds, bytes_up=outcome.bytes_up, bytes_down=outcome.bytes_down, seconds=outcome.seconds
            )
        )
        return outcome

    def abort(self, reason: str) -> None:
        """Tell the nodes that the federation has ended early."""
        self._publish_state("aborted", None, reason)

    def close(self) -> None:
        if self._link.connected:
            self._link.publish(self._presence_topic, encode(Presence(session=self._session, online=False)), retain=True)
            self._link.flush(5)
        self._courier.close()
        self._link.close()
        self._journal.close()

    # What arrives

    def _handle(self, event: object) -> None:
        match event:
            case Delivery():
                self._receive(event)
                self._link.ack(event)
            case Fetched(manifest):
                self._arrived(manifest)
            case FetchFailed(_, reason, peers_fault=False):
                raise EdgeNodeError(reason, "then start the federation again")
            case FetchFailed(manifest, reason):
                self._arriving.pop(manifest.node, None)
                self._refuse(PeerError(manifest.node, f"its contribution did not arrive: {reason}", manifest.round))
            case LinkUp():
                self._announce()
            case LinkDown():
                pass  # paho reconnects; nodes are told by the last will

    def _announce(self) -> None:
        """(Re)publish what is retained: a broker restarted without persistence has forgotten it."""
        presence = Presence(session=self._session, online=True)
        self._link.publish(self._presence_topic, encode(presence), retain=True)
        self._link.publish(topics.spec(self._spec.federation), encode(self._spec), retain=True)
        if self._state.status is rounds.Status.GATHERING:
            self._publish_state("gathering", None)
        else:
            self._publish_state("open" if self._state.status is rounds.Status.OPEN else "finished", self._manifest)

    def _receive(self, delivery: Delivery) -> None:
        node = topics.sender(delivery.topic)
        if node == topics.COORDINATOR or not delivery.payload:
            return
        try:
            self._dispatch(node, decode_any(delivery.payload))
        except DecodeError as error:
            self._refuse(PeerError(node, f"its message cannot be read: {error}", self._state.round))
        except PeerError as error:
            self._refuse(error)

    def _dispatch(self, node: str, message: AnyMessage) -> None:
        match message:
            case Presence(session=session, online=False):
                if self._sessions.get(node) == session:
                    self._lost(node)
            case Presence():
                pass
            case Hello():
                self._welcome(node, message)
            case Contribution() | Telemetry() | Finished() if (
                message.run != self._spec.run or self._sessions.get(node) != message.session
            ):
                pass  # of an earlier run or session: without effect
            case Contribution():
                self._offered(node, message)
            case Telemetry():
                self._report(progress.Measured(node=node, round=message.round, metrics=message.metrics))
            case Finished():
                self._unfinished.discard(node)
            case _:
                raise PeerError(node, f"a node does not send {type(message).__name__}", self._state.round)

    def _welcome(self, node: str, hello: Hello) -> None:
        known = self._sessions.get(node)
        if hello.run != self._spec.run:
            self._turn_away(node, hello, "that run of the federation is over", "run edge-node join again")
        elif known not in (None, hello.session) and node in self._state.present:
            self._turn_away(node, hello, f"the name {node!r} is taken by a connected node", "choose another --name")
        elif node not in self._admitted and len(self._admitted) >= self._spec.nodes:
            full = f"the federation is full: its {self._spec.nodes} nodes are {', '.join(sorted(self._admitted))}"
            self._turn_away(node, hello, full, "ask the coordinator's operator for more --nodes")
        else:
            self._admitted.add(node)
            self._sessions[node] = hello.session
            self._reply(node, Welcome(session=hello.session))
            if node not in self._state.present:
                self._unfinished.add(node)
                self._report(progress.NodeJoined(node=node))
                self._advance(rounds.Joined(node))
                if node in self._state.missing and self._state.status is rounds.Status.OPEN:
                    self._tell(node, "training")

    def _turn_away(self, node: str, hello: Hello, reason: str, remedy: str) -> None:
        self._reply(node, Refusal(session=hello.session, reason=reason, remedy=remedy))

    def _lost(self, node: str) -> None:
        if node in self._state.present and node in self._unfinished:
            self._report(progress.NodeLost(node=node, round=self._state.round))
        self._leave(node)

    def _leave(self, node: str) -> None:
        self._unfinished.discard(node)
        self._throttle.forget(node)
        self._advance(rounds.Left(node))

    # Contributions

    def _offered(self, node: str, message: Contribution) -> None:
        over = self._state.status is rounds.Status.FINISHED or message.round < self._state.round
        if over or node in self._state.contributed:
            self._accept(node, message)  # its effect is on disk, or it came too late to have one
            return
        if self._state.status is not rounds.Status.OPEN or message.round > self._state.round:
            raise PeerError(node, f"round {message.round} is not open", message.round)
        try:
            self._method.weigh(message.weight)
        except ValueError as error:
            raise PeerError(node, str(error), message.round) from error
        if (message.blob is None) != (not self._sent):
            raise PeerError(node, "its contribution carries the wrong number of blobs", message.round)
        if message.blob is None:
            self._add(node, message)
            return
        blob, spec = message.blob, self._spec
        if (blob.federation, blob.run, blob.round, blob.node) != (spec.federation, spec.run, message.round, node):
            raise PeerError(node, "its manifest belongs to another federation, run, round or node", message.round)
        if blob.size > self._largest:
            raise PeerError(
                node, f"its manifest promises {blob.size} bytes; {self._largest} are the most", message.round
            )
        self._arriving[node] = message
        self._courier.fetch(blob)

    def _arrived(self, manifest: Manifest) -> None:
        message = self._arriving.pop(manifest.node, None)
        if message is None or message.blob != manifest:
            return
        try:
            self._add(manifest.node, message)
        except PeerError as error:
            self._refuse(error)

    def _add(self, node: str, message: Contribution) -> None:
        """Validate a contribution that is here, sum it, write it down, tell its node."""
        if message.blob is not None:
            path = self._store.path(message.blob.digest)
            try:
                self._sums.check(read_tensors(path, self._sent))
            except (DecodeError, ValueError) as error:
                raise PeerError(node, str(error), message.round) from error
            self._sums.add(read_tensors(path, self._sent), self._method.weigh(message.weight))
        size = message.blob.size if message.blob else 0
        self._journal.contributed(self._spec.run, message.round, node, message.weight, message.blob)
        self._accept(node, message)
        self._report(progress.Contribution(node=node, round=message.round, weight=message.weight, bytes=size))
        self._tell(node, "waiting")
        self._advance(rounds.Contributed(node))

    def _accept(self, node: str, message: Contribution) -> None:
        self._reply(node, Accepted(session=message.session, run=message.run, round=message.round))

    def _refuse(self, error: PeerError) -> None:
        """Name the peer, tell it why, go on without it."""
        self._report(progress.NodeRefused(node=error.peer, round=self._state.round, reason=error.why))
        self._arriving.pop(error.peer, None)
        session = self._sessions.pop(error.peer, None)
        if session is not None:
            self._reply(
                error.peer,
                Refusal(session=session, reason=error.why, remedy="check the node's version and disk, then join again"),
            )
            self._leave(error.peer)

    # Rounds

    def _advance(self, event: rounds.Event) -> None:
        self._state, effects = rounds.advance(self._state, event)
        for effect in effects:
            match effect:
                case rounds.Open(round_):
                    self._open(round_)
                case rounds.Close(round_, contributors):
                    self._close_round(round_, contributors)
                case rounds.Finish():
                    self._publish_broadcast(self._spec.rounds, "finished")
                case rounds.Pause(round_):
                    absent = sorted(set(self._sessions) - self._state.present)
                    self._report(progress.Paused(round=round_, waiting_for=absent))

    def _open(self, round_: int) -> None:
        self._sums = FixedPointSum(self._sent, self._spec.nodes, self._method.weight_cap)
        self._publish_broadcast(round_, "open")
        self._journal.opened(self._manifest)
        self._rounds.open(round_)
        for node in sorted(self._state.present):
            self._tell(node, "training")

    def _close_round(self, round_: int, contributors: frozenset[str]) -> None:
        for late in self._arriving.values():
            assert late.blob is not None
            self._courier.cancel(late.blob)
        self._arriving.clear()
        share = self._sums.count / self._spec.nodes
        self._broadcast = self._method.finish(self._broadcast, self._sums.mean(), share)
        self._journal.closed(self._spec.run, round_)
        self._rounds.close(sorted(contributors))

    def _publish_broadcast(self, round_: int, status: Stage) -> None:
        """Put the broadcast where nodes can fetch it, forget the one before, and say so."""
        digest, size = self._store.put(encode_tensors(self._broadcast))
        for old in self._store.digests() - {digest}:
            self._courier.withdraw(old)
            self._store.remove(old)
        self._courier.offer(digest)
        self._manifest = Manifest(
            federation=self._spec.federation,
            run=self._spec.run,
            round=round_,
            node=topics.COORDINATOR,
            digest=digest,
            size=size,
            chunk_size=self._courier.chunk_size(self._chunk_size),
        )
        self._publish_state(status, self._manifest)

    def _publish_state(self, status: Stage, broadcast: Manifest | None, reason: str = "") -> None:
        message = RoundState(
            run=self._spec.run, round=self._state.round, status=status, broadcast=broadcast, reason=reason
        )
        self._link.publish(topics.round_state(self._spec.federation), encode(message), retain=True)

    def _tell(self, node: str, what: progress.Doing, blob: Manifest | None = None) -> None:
        """What a node does, as far as it can be known here."""
        done, total = (self._courier.received(blob.digest), blob.size) if blob else (0, 0)
        self._throttle.tell(progress.Activity(node=node, round=self._state.round, what=what, done=done, total=total))

    def _reply(self, node: str, message: AnyMessage) -> None:
        self._link.publish(topics.down(self._spec.federation, node), encode(message))
