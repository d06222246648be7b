"""Who speaks to a line's head: lets sensors in, turns others away, and passes on what the head can use."""

import contextlib
import time
from typing import Protocol

from broker_config.mqtt.client import Delivery
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import PeerError, brief
from broker_config.protocol.frames import Embeddings, decode_frame
from broker_config.protocol.messages import Finished, Message, Presence, Refusal, Welcome
from broker_config.protocol.vfl_messages import VflHello, VflSpec
from trainer import progress
from trainer.federation.server.announcements import claimed
from trainer.federation.server.membership import HELLO_COST, MAX_MESSAGES, WINDOW, Membership
from trainer.vfl.server.announcements import Crier
from trainer.vfl.server.journal import Journal, Member
from trainer.vfl.server.round_state import PartyProgress

_AGAIN = "see the head's log, then join again"
_KEEP = "pass the same --columns as before, or begin anew: edge-node vfl coordinate --new"


class Listener(Protocol):
    """What the head does with what it hears."""

    @property
    def round(self) -> int:
        """The last one that is closed."""
        ...

    @property
    def over(self) -> bool:
        """Whether the last round is closed: sensors may go."""
        ...

    def embedded(self, sensor: str, frame: Embeddings) -> None:
        """A sensor's embeddings; PeerError if they lie."""
        ...

    def came(self, sensor: str, standing: PartyProgress, *, anew: bool) -> None:
        """A sensor takes part, and says how far it is; `anew`: for the first time in its process's life."""
        ...

    def finished(self, sensor: str) -> None:
        """A sensor has written down the last round."""
        ...


class Reception:
    """The members of one run, and the processes that speak for them."""

    def __init__(
        self,
        spec: VflSpec,
        endpoint: Endpoint,
        session: str,
        journal: Journal,
        crier: Crier,
        listener: Listener,
        report: progress.Report,
    ):
        self._spec, self._endpoint, self._session = spec, endpoint, session
        self._journal, self._crier, self._listener, self._report = journal, crier, listener, report
        self.members = journal.members(spec.run)
        self.present: set[str] = set()  # whose connection stands, as far as we know
        self._identities = {name: each.identity for name, each in self.members.items()}
        self._membership = Membership(len(spec.sensors), self._identities)
        self._heard_self = False

    @property
    def complete(self) -> bool:
        """Whether every sensor has been there once: then it is known how large their embeddings are."""
        return self.members.keys() >= set(self._spec.sensors)

    def receive(self, delivery: Delivery) -> None:
        """Take in a message; UsageError if another head is there that comes first."""
        sensor = topics.sender(delivery.topic)
        if not delivery.payload:
            return
        if sensor == topics.COORDINATOR:
            self._check_own(delivery)
            return
        try:
            if sensor not in self._spec.sensors:
                raise PeerError(brief(sensor, 64), f"this line's sensors are {', '.join(self._spec.sensors)}")
            if delivery.topic == topics.embeddings(self._spec.federation, sensor):
                self._look_at(sensor, delivery.payload)
            elif not self._is_too_much(sensor, delivery.topic):
                self._hear(sensor, decode(delivery.payload, Message))
        except DecodeError as error:
            self.refuse(PeerError(sensor, f"its message cannot be read: {error}"))
        except PeerError as error:
            self.refuse(error)

    def refuse(self, error: PeerError, remedy: str = _AGAIN) -> None:
        """Tell a sensor that it takes part no more, and why."""
        name = error.peer
        if self._membership.is_first_report("refused", name):
            self._report(progress.NodeRefused(node=name, round=self._listener.round, reason=error.why))
        session = self._membership.expel(name) if name in self._spec.sensors else None
        self.present.discard(name)
        if session:
            self._crier.answer(name, Refusal(session=session, reason=error.why, remedy=remedy))

    def release(self, sensor: str) -> None:
        """Tell a sensor that the line is over. In answer to its own session: what is retained may be played back."""
        if session := self._membership.session(sensor):
            self._crier.answer(sensor, Finished(session=session, run=self._spec.run))

    def _look_at(self, sensor: str, payload: bytes) -> None:
        frame = decode_frame(payload)
        if not isinstance(frame, Embeddings):
            raise PeerError(sensor, f"it sent a {type(frame).__name__} as embeddings")
        if frame.session == self._membership.session(sensor):  # else it is of an earlier process
            self._listener.embedded(sensor, frame)

    def _is_too_much(self, sensor: str, topic: str) -> bool:
        """Whether a sensor says more than there can be to say. What it has signed the broker may have repeated."""
        worth = HELLO_COST if topic == topics.up(self._spec.federation, sensor) else 1
        if not self._membership.is_flooding(sensor, time.monotonic(), worth):
            return False
        if self._endpoint.seal is None:
            raise PeerError(sensor, f"it sends more than {MAX_MESSAGES} messages in {WINDOW:g} s")
        return True

    def _hear(self, sensor: str, message: Message) -> None:
        match message:
            case Presence(session=session, online=False):
                if self._membership.session(sensor) == session:
                    self.present.discard(sensor)
                    if not self._listener.over:
                        self._report(progress.NodeLost(node=sensor, round=self._listener.round))
            case Presence():
                pass
            case VflHello():
                self._welcome(sensor, message)
            case Finished(run=run):
                if run == self._spec.run:
                    self._listener.finished(sensor)
            case _:
                raise PeerError(sensor, f"it sent a {type(message).__name__}")

    def _welcome(self, sensor: str, hello: VflHello) -> None:
        if self._membership.is_stale(sensor, hello):
            return
        if objection := self._objection(sensor, hello):
            self._crier.answer(sensor, objection)
            return
        member = Member(hello.identity, hello.columns)
        if self.members.get(sensor) != member:
            self._journal.admit(self._spec.run, sensor, member)
            self.members[sensor], self._identities[sensor] = member, member.identity
        if anew := self._membership.session(sensor) != hello.session:
            self._report(progress.NodeJoined(node=sensor))
        self._membership.admit(sensor, hello)
        self.present.add(sensor)
        if hello.lacks and hello.lacks != self._crier.lacks.get(sensor):
            self._report(progress.Note(text=f"the line waits for {sensor}, which lacks {brief(hello.lacks, 300)}"))
        self._crier.lacks[sensor] = hello.lacks
        self._crier.answer(sensor, Welcome(session=hello.session))
        self._listener.came(sensor, PartyProgress(hello.round, hello.kept), anew=anew)

    def _objection(self, sensor: str, hello: VflHello) -> Refusal | None:
        def refusal(reason: str, remedy: str) -> Refusal:
            return Refusal(session=hello.session, reason=reason, remedy=remedy)

        known = self.members.get(sensor)
        if found := self._membership.find_objection(sensor, hello, self._spec.run, present=sensor in self.present):
            return found
        if known and known.columns != hello.columns and self._listener.round:
            return refusal(f"{sensor} had {known.columns} columns, and now has {hello.columns}", _KEEP)
        return None

    def _check_own(self, delivery: Delivery) -> None:
        """Somebody speaks as the head: an earlier process of ours, whose will comes late, or another head.

        Of two that started at the same time one goes on, whose session comes first. What comes before our own presence
        has come back is old.
        """
        with contextlib.suppress(DecodeError):
            presence = decode(delivery.payload, Presence)
            if presence.session == self._session:
                self._heard_self |= not delivery.retain
                return
            if self._heard_self and presence.online and presence.session < self._session:
                raise claimed(self._spec.federation, self._endpoint)
        if self._heard_self or not delivery.retain:
            self._crier.say_presence(online=True)
