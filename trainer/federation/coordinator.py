"""The coordinator: MQTT and clock around the round's state machine (`round`) and what is on disk (`ledger`)."""

import contextlib
import queue
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from broker_config import topics
from broker_config.codec import DecodeError, decode, decode_any, encode
from broker_config.errors import EdgeNodeError, PeerError, UsageError
from broker_config.link import TAKEN_OVER, Delivery, Endpoint, Link, LinkDown, LinkUp, probe
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
    Stage,
    Telemetry,
    Welcome,
)
from broker_config.transfer import Courier, Fetched, FetchFailed
from trainer import progress
from trainer.federation import round as rounds
from trainer.federation.ledger import Ledger
from trainer.federation.roster import MOST, WINDOW, Roster
from trainer.tree import Arrays

DEFAULT_CHUNK = 256 * 1024
LINGER = 60.0  # seconds for absent nodes to come back and fetch the result
_INBOX = 4096  # events; beyond that the broker keeps them
_TICK = 0.2  # seconds


class Outcome(NamedTuple):
    """What a finished federation leaves."""

    broadcast: Arrays  # after the last round
    bytes_up: int
    bytes_down: int
    seconds: float


def coordinate(
    ledger: Ledger,
    endpoint: Endpoint,
    report: progress.Report,
    *,
    chunk_size: int = DEFAULT_CHUNK,
    linger: float = LINGER,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome | None:
    """Run a federation from where its ledger stands to its end; None when `stop` said to suspend it.

    Args:
        ledger: of a run that has begun.
        endpoint: the broker.
        report: shows progress.
        chunk_size: bytes of a message; a broker's own limit is honoured anyway.
        linger: seconds that the result is kept ready for nodes that are away when the last round closes.
        stop: asked often.

    Raises:
        LinkError: the broker cannot be reached.
        UsageError: the federation is already coordinated on this broker.
        EdgeNodeError: the disk fails. Started again with the same ledger, the federation goes on.
    """
    assert ledger.run is not None
    _check_unclaimed(endpoint, ledger.run.spec.federation, ledger.run.sessions)
    coordinator = _Coordinator(ledger, endpoint, report, chunk_size, linger)
    try:
        return coordinator.run(stop)
    finally:
        coordinator.close()


def abort(ledger: Ledger, endpoint: Endpoint, reason: str) -> None:
    """End a run early, and tell its nodes, now or when they look.

    Raises:
        LinkError: the broker cannot be reached.
    """
    assert ledger.run is not None
    spec, round_ = ledger.run.spec, min(ledger.run.round, ledger.run.spec.rounds)
    message = RoundState(run=spec.run, round=round_, status="aborted", reason=reason)
    with Link(endpoint, f"abort-{secrets.token_hex(8)}", inbox=queue.Queue(), persistent=False) as link:
        link.publish(topics.round_state(spec.federation), encode(message), retain=True)
        if not link.flush(10):
            raise EdgeNodeError(f"{endpoint} did not confirm within 10 s that it tells the nodes", "try again")
    ledger.abort()


def _check_unclaimed(endpoint: Endpoint, federation: str, ours: frozenset[str]) -> None:
    topic = topics.presence(federation, topics.COORDINATOR)
    for payload in probe(endpoint, [topic], wait=1.0).values():
        with contextlib.suppress(DecodeError):  # what cannot be read is nobody's presence; ours replaces it
            presence = decode(payload, Presence)
            if presence.online and presence.session not in ours:
                raise _claimed(federation, endpoint)


def _claimed(federation: str, endpoint: Endpoint) -> UsageError:
    return UsageError(
        f"federation {federation!r} already has a coordinator on {endpoint}",
        "stop that one, or choose another name with --federation (after a crash the broker notices within a minute)",
    )


class _Coordinator:
    def __init__(self, ledger: Ledger, endpoint: Endpoint, report: progress.Report, chunk_size: int, linger: float):
        self._ledger, self._endpoint, self._report, self._linger = ledger, endpoint, report, linger
        self._session = secrets.token_hex(8)
        self._state = ledger.resume(self._session)
        self._spec = spec = ledger.spec
        self._roster = Roster(spec.nodes, ledger.identities)
        self._expelled: set[str] = set()  # members that were refused and are not waited for at the end
        self._arriving: dict[str, Contribution] = {}  # whose blob is under way, by node
        self._started = self._opened = time.monotonic()
        self._alone_since: float | None = None  # when the last of those left who still want the result

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
        self._preferred_chunk = chunk_size
        self._courier = Courier(endpoint, spec.federation, topics.COORDINATOR, ledger.store, self._inbox)
        self._rounds = progress.Rounds(report, lambda: (self._courier.bytes_received, self._courier.bytes_sent))
        self._throttle = progress.Throttle(report)

    def run(self, stop: Callable[[], bool]) -> Outcome | None:
        spec = self._spec
        self._link.open()
        self._courier.start()
        self._link.subscribe(topics.presence(spec.federation, "+"), topics.up(spec.federation, "+"))
        self._report(progress.Gathering(federation=spec.federation, run=spec.run, nodes=spec.nodes, rounds=spec.rounds))
        self._take_up()
        self._handle(self._inbox.get())  # LinkUp: what is retained of an earlier run is replaced
        self._link.flush(5)
        self._advance(rounds.Resumed())
        while not self._is_over():
            if stop():
                return None
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=_TICK))
            self._watch_clock()
            for node, message in self._arriving.items():
                self._tell(node, "sending", message.blob)
        outcome = Outcome(
            self._ledger.broadcast,
            self._courier.bytes_received,
            self._courier.bytes_sent,
            time.monotonic() - self._started,
        )
        self._report(
            progress.FederationFinished(
                rounds=spec.rounds, bytes_up=outcome.bytes_up, bytes_down=outcome.bytes_down, seconds=outcome.seconds
            )
        )
        return outcome

    def close(self) -> None:
        if self._link.connected:
            self._link.publish(self._presence_topic, encode(Presence(session=self._session, online=False)), retain=True)
            self._link.flush(5)
        self._courier.close()
        self._link.close()

    def _take_up(self) -> None:
        """Show where an earlier process of this coordinator stopped, and offer what nodes may still have to fetch."""
        if self._state.status is rounds.Status.GATHERING:
            return
        self._courier.offer(self._ledger.broadcast_blob.digest)
        self._report(progress.Note(text=f"going on with run {self._spec.run} in round {self._state.round}"))
        if self._state.status is rounds.Status.OPEN:
            self._rounds.open(self._state.round)

    def _is_over(self) -> bool:
        """Whether the last round is closed and nobody can be expected who has yet to fetch the result."""
        if self._state.status is not rounds.Status.FINISHED:
            return False
        waiting = self._ledger.identities.keys() - self._ledger.finished - self._expelled
        if not waiting:
            return True
        if waiting & self._state.present:
            self._alone_since = None
            return False
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
            names, command = ", ".join(sorted(waiting)), "edge-node coordinate"
            self._report(
                progress.Note(
                    text=f"waiting {self._linger:g} s for {names} to fetch the result; {command} serves it again later"
                )
            )
        return now - self._alone_since >= self._linger

    def _watch_clock(self) -> None:
        now = time.monotonic()
        for node in self._roster.silent(now):
            self._lost(node)
        if self._state.status is rounds.Status.OPEN:
            age, spec, round_ = now - self._opened, self._spec, self._state.round
            if spec.min_wait and age >= spec.min_wait and not self._state.waited:
                self._advance(rounds.Waited(round_))
            if spec.deadline and age >= spec.deadline and not self._state.expired:
                self._advance(rounds.Expired(round_))

    # What arrives

    def _handle(self, event: object) -> None:
        match event:
            case Delivery():
                self._receive(event)
                self._link.ack(event)
            case Fetched(manifest):
                self._arrived(manifest)
            case FetchFailed(manifest) if not self._is_arriving(manifest):
                pass  # nobody waits for it any more
            case FetchFailed(_, reason, peers_fault=False):
                raise EdgeNodeError(reason, "then start the coordinator again: it goes on where it was")
            case FetchFailed(manifest, reason):
                self._refuse(PeerError(manifest.node, f"its contribution did not arrive: {reason}", manifest.round))
            case LinkUp():
                self._announce()
                self._roster.doubt(self._state.present, time.monotonic())
            case LinkDown(_, reason) if reason == TAKEN_OVER:
                raise _claimed(self._spec.federation, self._endpoint)
            case LinkDown(_, reason):
                self._report(progress.Note(text=f"connection lost ({reason}); trying again"))

    def _announce(self) -> None:
        """(Re)publish what is retained: a broker restarted without persistence has forgotten it."""
        self._publish_presence()
        self._link.publish(topics.spec(self._spec.federation), encode(self._spec), retain=True)
        self._publish_state()

    def _receive(self, delivery: Delivery) -> None:
        node = topics.sender(delivery.topic)
        if not delivery.payload:
            return
        if node == topics.COORDINATOR:
            self._check_own(delivery)
            return
        try:
            if self._roster.floods(node, time.monotonic()):
                raise PeerError(node, f"it sends more than {MOST} messages in {WINDOW:g} s", self._state.round)
            self._dispatch(node, decode_any(delivery.payload))
        except DecodeError as error:
            self._refuse(PeerError(node, f"its message cannot be read: {error}", self._state.round))
        except PeerError as error:
            self._refuse(error)

    def _check_own(self, delivery: Delivery) -> None:
        """Somebody speaks as the coordinator: an earlier process of ours, whose will comes late, or another one."""
        with contextlib.suppress(DecodeError):
            presence = decode(delivery.payload, Presence)
            if presence.session == self._session:
                return
            if presence.online and presence.session not in self._ledger.sessions:
                raise _claimed(self._spec.federation, self._endpoint)
        if not delivery.retain:
            self._publish_presence()

    def _dispatch(self, node: str, message: AnyMessage) -> None:
        match message:
            case Presence(session=session, online=False):
                if self._roster.session(node) == session:
                    self._lost(node)
            case Presence():
                pass
            case Hello():
                self._welcome(node, message)
            case Contribution() | Telemetry() | Finished() if (
                message.run != self._spec.run or self._roster.session(node) != message.session
            ):
                pass  # of an earlier run or session: without effect
            case Contribution():
                self._offered(node, message)
            case Telemetry():
                self._report(progress.Measured(node=node, round=message.round, metrics=message.metrics))
            case Finished():
                if self._state.status is rounds.Status.FINISHED:
                    self._ledger.finish(node)
            case _:
                raise PeerError(node, f"a node does not send {type(message).__name__}", self._state.round)

    def _welcome(self, node: str, hello: Hello) -> None:
        present = node in self._state.present
        refusal = self._roster.objection(node, hello, self._spec.run, present=present)
        if refusal is not None:
            if self._roster.is_news(node, refusal.reason):
                self._report(progress.Note(text=f"{node} was not let in: {refusal.reason}"))
            self._reply(node, refusal)
        elif not self._roster.is_stale(node, hello):
            is_new = not present or self._roster.session(node) is None
            self._ledger.admit(node, hello.identity)
            self._roster.admit(node, hello)
            self._expelled.discard(node)
            self._reply(node, Welcome(session=hello.session))
            if is_new:
                self._report(progress.NodeJoined(node=node))
                self._advance(rounds.Joined(node))
                if node in self._state.missing and self._state.status is rounds.Status.OPEN:
                    self._tell(node, "training")

    def _lost(self, node: str) -> None:
        if node in self._state.present and node not in self._ledger.finished:
            self._report(progress.NodeLost(node=node, round=self._state.round))
        self._leave(node)

    def _leave(self, node: str) -> None:
        self._throttle.forget(node)
        self._roster.heard(node)
        self._advance(rounds.Left(node))

    # Contributions

    def _offered(self, node: str, message: Contribution) -> None:
        state, spec = self._state, self._spec
        if state.status is rounds.Status.OPEN and message.round == state.round and node in state.contributed:
            self._accept(node, message)  # its effect is on disk
            return
        if state.status is rounds.Status.FINISHED or message.round < state.round:
            self._settle_late(node, message)
            return
        if state.status is not rounds.Status.OPEN or message.round > state.round:
            raise PeerError(node, f"round {message.round} is not open", message.round)
        if not state.takes_part(node):
            raise PeerError(node, f"it was not drawn for round {message.round}", message.round)
        try:
            self._ledger.weigh(message.weight)
        except ValueError as error:
            raise PeerError(node, str(error), message.round) from error
        if (message.blob is None) != (not self._ledger.largest):
            raise PeerError(node, "its contribution carries the wrong number of blobs", message.round)
        if message.blob is None:
            self._add(node, message)
            return
        blob = message.blob
        if (blob.federation, blob.run, blob.round, blob.node) != (spec.federation, spec.run, message.round, node):
            raise PeerError(node, "its manifest belongs to another federation, run, round or node", message.round)
        if blob.size > self._ledger.largest:
            raise PeerError(
                node, f"its manifest promises {blob.size} bytes; {self._ledger.largest} are the most", message.round
            )
        if not self._is_arriving(blob):
            self._forget_arriving(node)
            self._courier.fetch(blob)
        self._arriving[node] = message

    def _settle_late(self, node: str, message: Contribution) -> None:
        """A contribution to a round that is closed: summed before it closed, or too late."""
        if self._ledger.has_counted(node, message.round):
            self._accept(node, message)
            return
        reason = f"round {message.round} was closed before this contribution came"
        self._report(progress.Late(node=node, round=message.round))
        self._reply(
            node, Accepted(session=message.session, run=message.run, round=message.round, counted=False, reason=reason)
        )

    def _is_arriving(self, blob: Manifest) -> bool:
        message = self._arriving.get(blob.node)
        return message is not None and message.blob == blob

    def _forget_arriving(self, node: str) -> None:
        message = self._arriving.pop(node, None)
        if message is not None and message.blob is not None:
            self._courier.cancel(message.blob)

    def _arrived(self, manifest: Manifest) -> None:
        if self._is_arriving(manifest):
            try:
                self._add(manifest.node, self._arriving.pop(manifest.node))
            except PeerError as error:
                self._refuse(error)

    def _add(self, node: str, message: Contribution) -> None:
        """Validate a contribution that is here, write it down, sum it, tell its node."""
        self._ledger.contribute(node, message)
        size = message.blob.size if message.blob else 0
        self._accept(node, message)
        self._report(progress.Contribution(node=node, round=message.round, weight=message.weight, bytes=size))
        self._tell(node, "waiting")
        self._advance(rounds.Contributed(node))

    def _accept(self, node: str, message: Contribution) -> None:
        self._reply(node, Accepted(session=message.session, run=message.run, round=message.round))

    def _refuse(self, error: PeerError) -> None:
        """Name the peer, tell it why, go on without it."""
        node = error.peer
        self._forget_arriving(node)
        session = self._roster.dismiss(node)
        if self._roster.is_news(node, error.why):
            self._report(progress.NodeRefused(node=node, round=self._state.round, reason=error.why))
        if session is not None:
            self._expelled.add(node)
            remedy = "check the node's version and disk, then join again"
            self._reply(node, Refusal(session=session, reason=error.why[:2000], remedy=remedy))
            self._leave(node)

    # Rounds

    def _advance(self, event: rounds.Event) -> None:
        self._state, effects = rounds.advance(self._state, event)
        for effect in effects:
            match effect:
                case rounds.Open(round_, drawn):
                    self._open(round_, drawn)
                case rounds.Close(_, contributors):
                    self._close_round(contributors)
                case rounds.Finish():
                    self._ledger.conclude()
                    self._publish_broadcast()
                case rounds.Pause(round_):
                    absent = sorted(
                        node for node in self._state.members - self._state.present - self._state.contributed
                    )
                    self._report(progress.Paused(round=round_, waiting_for=absent))
                    self._publish_state()
                case rounds.Resume(round_):
                    self._report(progress.Note(text=f"enough nodes are there again: round {round_} goes on"))
                    self._publish_state()

    def _open(self, round_: int, drawn: frozenset[str]) -> None:
        self._ledger.open(round_, drawn)
        self._opened = time.monotonic()
        self._publish_broadcast()
        self._rounds.open(round_)
        for node in sorted(self._state.missing):
            self._tell(node, "training")

    def _close_round(self, contributors: frozenset[str]) -> None:
        for node in list(self._arriving):
            self._forget_arriving(node)
        self._courier.withdraw(self._ledger.broadcast_blob.digest)
        self._ledger.average()
        self._rounds.close(sorted(contributors))

    def _publish_broadcast(self) -> None:
        self._courier.offer(self._ledger.broadcast_blob.digest)
        self._publish_state()

    def _publish_state(self) -> None:
        """Say where the federation stands, and what nodes can fetch."""
        state, spec, blob = self._state, self._spec, self._ledger.broadcast_blob
        stage: Stage = "gathering"
        if state.status is not rounds.Status.GATHERING:
            stage = "open" if state.status is rounds.Status.OPEN else "finished"
        manifest = Manifest(
            federation=spec.federation,
            run=spec.run,
            round=state.round,
            node=topics.COORDINATOR,
            digest=blob.digest,
            size=blob.size,
            chunk_size=self._courier.chunk_size(self._preferred_chunk),
        )
        here = len(state.missing | state.contributed)
        message = RoundState(
            run=spec.run,
            round=state.round,
            status=stage,
            broadcast=None if stage == "gathering" else manifest,
            reason=f"paused: {here} of the {spec.quorum} nodes that a round needs are there" if state.paused else "",
            participants=tuple(sorted(state.drawn)),
        )
        self._link.publish(topics.round_state(spec.federation), encode(message), retain=True)

    def _publish_presence(self) -> None:
        self._link.publish(self._presence_topic, encode(Presence(session=self._session, online=True)), retain=True)

    def _tell(self, node: str, what: progress.Doing, blob: Manifest | None = None) -> None:
        """What a node does, as far as it can be known here."""
        done, total = (self._courier.received(blob.digest), blob.size) if blob else (0, 0)
        self._throttle.tell(progress.Activity(node=node, round=self._state.round, what=what, done=done, total=total))

    def _reply(self, node: str, message: AnyMessage) -> None:
        self._link.publish(topics.down(self._spec.federation, node), encode(message))
