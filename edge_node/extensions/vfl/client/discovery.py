"""Discovery of a vertical federation on a broker. Without torch."""

from collections.abc import Callable, Mapping
from pathlib import Path

from broker_config.mqtt.collision import decode_presence
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode
from broker_config.protocol.errors import BrokerError
from broker_config.protocol.messages import RoundState
from edge_node.extensions.vfl.messages import VflSpec
from trainer import progress
from trainer.federation.client.discovery import EndedError, check_version, wait_for_spec


def find_spec(
    endpoint: Endpoint,
    federation: str | None,
    wait: float,
    stop: Callable[[], bool] = lambda: False,
    *,
    state: Path = Path(),
    report: progress.Report = progress.ignore,
) -> VflSpec | None:
    """The spec of the one vertical federation on this broker, or of the named one;
    None when `stop` said so.

    One counts if its head is connected, if it is named, or if `state` has something of its run.

    Raises:
        EndedError: there are only such as have played all rounds, whose heads have gone, and no
            other run begins.
        UsageError: there are several, or it speaks another version.
        BrokerError: there is none within `wait` seconds.
    """
    told = ""

    def select(retained: Mapping[str, bytes]) -> Mapping[str, VflSpec]:
        nonlocal told
        specs = {
            spec.federation: spec
            for topic, payload in retained.items()
            if (spec := _read(topic, payload))
        }
        known = {
            name
            for name, spec in specs.items()
            if _has_head(retained, name) or (state / spec.run).exists()
        }
        over = {
            name
            for name, spec in specs.items()
            if name not in known and _has_finished(retained, spec)
        }
        joinable = {
            name: spec
            for name, spec in specs.items()
            if name in known or (federation and name not in over)
        }
        if over and over == specs.keys():
            raise EndedError(
                f"vertical federation {min(over)} has played all its rounds, none of them with "
                "this state folder",
                "name its folder with --state; or ask for a new run (edge-node vfl coordinate "
                "--new), then join again",
            )
        if not joinable:
            check_version(retained)
            names = ", ".join(sorted(specs))
            if names and names != told:
                report(progress.Note(text=f"no head is connected for {names}; waiting for one"))
            told = names
        return joinable

    absent = BrokerError(
        f"no head of a vertical federation appeared on {endpoint} within {wait:.0f} s",
        "start edge-node vfl coordinate first, and check that both use the same broker and "
        "--federation",
    )
    name = federation or "+"
    filters = [
        topics.any_version(topics.spec(name)),
        topics.presence(name, topics.COORDINATOR),
        topics.round_state(name),
    ]
    return wait_for_spec(
        endpoint, filters, select, wait, absent, lambda text: report(progress.Note(text=text)), stop
    )


def _has_head(retained: Mapping[str, bytes], federation: str) -> bool:
    """Whether the head of a federation is connected."""
    presence = decode_presence(retained.get(topics.presence(federation, topics.COORDINATOR), b""))
    return presence is not None and presence.online


def _has_finished(retained: Mapping[str, bytes], spec: VflSpec) -> bool:
    """Whether the last that the head of this run said was its end."""
    try:
        state = decode(retained.get(topics.round_state(spec.federation), b""), RoundState)
    except DecodeError:
        return False
    return state.run == spec.run and state.status == "finished"


def _read(topic: str, payload: bytes) -> VflSpec | None:
    """The spec; None for one of a horizontal federation."""
    try:
        return (
            decode(payload, VflSpec) if topic == topics.spec(topics.federation_of(topic)) else None
        )
    except DecodeError:
        return None
