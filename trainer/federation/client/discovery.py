"""Discovery of a federation on a broker: its spec, and whether this node fits. Without torch."""

import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from broker_config.mqtt.client import Endpoint, read_retained
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import BrokerError, EdgeNodeError, UsageError
from broker_config.protocol.messages import RoundState, Spec
from trainer.data import class_names
from trainer.federation.client import checkpoint
from trainer.federation.presence import AWAY, Patience, is_connected
from trainer.methods import METHODS
from trainer.models.catalogue import FEATURES

Notify = Callable[[str], None]
T = TypeVar("T")
_PAUSE = 0.3  # seconds between two looks at the broker
_NEXT_RUN = 10.0  # seconds in which a run that follows one that has ended may show itself


class EndedError(EdgeNodeError):
    """There are only federations that have ended, and need none of this node."""


class Joinable(NamedTuple):
    """A federation that can be joined."""

    spec: Spec
    finished: bool  # its run has ended


def discover(
    endpoint: Endpoint,
    federation: str | None,
    wait: float,
    notify: Notify,
    stop: Callable[[], bool],
    state: Path,
    *,
    without_images: bool = False,
) -> Joinable | None:
    """The one federation on this broker that can be joined, or the named one;
    None when `stop` said so.

    One that has finished can be joined if `state` holds this node's part of it: its model may be
    missing; or if its result holds statistics, of which a newcomer can make a model, and its
    coordinator is there to serve them. A node without images can join no other.

    Raises:
        UsageError: there is none within `wait` seconds, there are several, or it speaks another
            version.
        EndedError: there are only such as have ended, and no other run begins within ten seconds.
    """
    said = set[str]()

    def notify_once(text: str) -> None:
        if text not in said:
            said.add(text)
            notify(text)

    def select(retained: Mapping[str, bytes]) -> Mapping[str, Joinable]:
        found, ended = _select_joinable(retained, notify_once, state, endpoint)
        if not found and ended:
            raise EndedError(ended[0].what, ended[0].remedy)
        if without_images:
            for name in [name for name, each in found.items() if not each.finished]:
                notify_once(
                    f"federation {name} is under way: a node without images waits for its result"
                )
                del found[name]
        if not found:
            check_version(retained)
            name = f"federation {federation}" if federation else "federation"
            notify_once(f"no {name} on {endpoint} yet; waiting for its coordinator")
        return found

    absent = UsageError(
        f"no coordinator appeared on {endpoint} within {wait:.0f} s",
        "start edge-node coordinate first, and check that both use the same broker and "
        "--federation",
    )
    filters = [
        topics.any_version(topics.spec(federation or "+")),
        topics.round_state(federation or "+"),
    ]
    return wait_for_spec(endpoint, filters, select, wait, absent, notify, stop)


def wait_for_spec(
    endpoint: Endpoint,
    filters: Sequence[str],
    select: Callable[[Mapping[str, bytes]], Mapping[str, T]],
    wait: float,
    absent: EdgeNodeError,
    notify: Notify,
    stop: Callable[[], bool],
) -> T | None:
    """The one spec that `select` finds, by its federation,
    in the retained messages under `filters`.

    None when `stop` said so; after `wait` seconds without a spec, `absent` is raised. UsageError if
    there are several. An EndedError of `select` counts if it lasts: whoever starts the next run may
    be about to. So does a BrokerError.
    """
    deadline = time.monotonic() + wait
    broker = Patience(notify, min(wait, AWAY))
    patience = time.monotonic() + min(wait, _NEXT_RUN)
    while not stop():
        try:
            specs = select(read_retained(endpoint, filters, wait=1.0))
            broker.renew()
        except BrokerError as error:
            broker.bear(error)
            continue
        except EndedError:
            if time.monotonic() >= patience:
                raise
            specs = {}
        if len(specs) == 1:
            return next(iter(specs.values()))
        if specs:
            raise UsageError(
                f"there are several federations on {endpoint}: {', '.join(sorted(specs))}",
                "choose one with --federation",
            )
        if time.monotonic() > deadline and not stop():
            raise absent
        time.sleep(_PAUSE)
    return None


def check_version(retained: Mapping[str, bytes]) -> None:
    """Raise UsageError if there is a federation of another version of the protocol."""
    for topic in retained:
        if not topic.startswith(topics.ROOT + "/"):
            raise UsageError(
                f"the federation speaks protocol {'/'.join(topic.split('/')[:2])}, this node "
                f"{topics.ROOT}",
                "install the version of edge-node here that its server has",
            )


def ended_early(state: RoundState) -> "EndedError":
    """The error for a run that was aborted."""
    return EndedError(
        f"the federation ended early: {state.reason}", "ask its operator, then join again"
    )


def _select_joinable(
    retained: Mapping[str, bytes], notify: Notify, folder: Path, endpoint: Endpoint
) -> tuple[dict[str, Joinable], list[EdgeNodeError]]:
    """The federations among retained messages that can be joined,
    as far as their rounds can be read.

    And of each that has ended, why it cannot.
    """
    joinable: dict[str, Joinable] = {}
    ended: list[EdgeNodeError] = []
    for topic, payload in sorted(retained.items()):
        if topic != topics.spec(topics.federation_of(topic)):
            continue
        spec = _read_spec(topic, payload)
        round_topic = topics.round_state(spec.federation)
        if round_topic in retained:
            try:
                state = decode(retained[round_topic], RoundState)
            except DecodeError as error:
                notify(f"ignored an unreadable message on {round_topic}: {error}")
                continue
            finished = state.status == "finished"
            if state.run != spec.run:
                continue
            if state.status == "aborted":
                ended.append(ended_early(state))
            elif finished and spec.chooses and not checkpoint.has_progress(folder, spec.run):
                notify(f"federation {spec.federation} has compared encoders: its next run follows")
            elif (
                finished
                and not checkpoint.has_progress(folder, spec.run)
                and (over := _find_over(spec, endpoint))
            ):
                ended.append(over)
            else:
                joinable[spec.federation] = Joinable(spec, finished)
    return joinable, ended


def _find_over(spec: Spec, endpoint: Endpoint) -> EdgeNodeError | None:
    """Why a newcomer cannot have the result of a finished run, and make a model of it;
    None if it can.
    """
    if not spec.statistics:
        return EdgeNodeError(
            f"federation {spec.federation} has finished, and this node has no part in its model",
            "ask its operator for a new run (edge-node coordinate --new), then join again",
        )
    if is_connected(endpoint, spec.federation, topics.COORDINATOR):
        return None
    return EdgeNodeError(
        f"federation {spec.federation} has finished, and its coordinator is not there to serve "
        "newcomers its result",
        "ask its operator to start edge-node coordinate again with its --state, then join again",
    )


def _read_spec(topic: str, payload: bytes) -> Spec:
    try:
        spec = decode(payload, Spec)
    except DecodeError as error:
        raise UsageError(
            f"the spec on {topic} cannot be read ({error})",
            "install the coordinator's version of edge-node here",
        ) from error
    if fault := class_names.find_fault(spec.aliases, spec.classes):
        raise UsageError(
            f"the spec on {topic} contradicts itself: {fault}", "have its coordinator started anew"
        )
    for what, name, known in (("method", spec.method, METHODS), ("model", spec.model, FEATURES)):
        if name not in known:
            raise UsageError(
                f"federation {spec.federation!r} uses the {what} {name!r}, which this version "
                f"({importlib.metadata.version('edge-node')}) does not have",
                f"install edge-node {spec.software} here, or the package that brings {name!r}",
            )
    return spec
