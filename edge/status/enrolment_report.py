"""Report of a run of `request`: what was made or completed and which steps follow,
for people and for machines.
"""

from collections.abc import Iterator
from typing import Any

from broker_config.protocol.topics import COORDINATOR, MONITOR
from broker_config.security.enrolment import Accepted, Enrolment, Requested

_NEXT = {
    COORDINATOR: "edge-node coordinate --kit {kit} --classes ...",
    MONITOR: "edge-node status --kit {kit}",
}


def requested_object(place: Enrolment, requested: Requested) -> dict[str, Any]:
    """A request's report for machines."""
    return {
        "federation": place.federation,
        "name": place.name,
        "request": str(place.request),
        "fingerprint": requested.fingerprint,
        "made": requested.made,
    }


def requested_text(place: Enrolment, requested: Requested) -> Iterator[str]:
    """A request's report for people."""
    if requested.made:
        yield f"keys of {place.name}: {place.kit}, which stays on this machine"
        yield (
            f"its passphrase: {place.passphrase}; move it to where only those look who may use "
            "the kit"
        )
    else:
        yield f"{place.kit} has keys already, and keeps them: this request is for them"
    yield f"fingerprint of the request: {requested.fingerprint}"
    yield "next:"
    yield (
        f"  1. send {place.request} to whoever provisions {place.federation}; read out its "
        "fingerprint by telephone"
    )
    yield (
        f"  2. with the answer: edge-node request {place.federation} {place.name} --accept "
        f"{place.name}.answer"
    )


def accepted_object(place: Enrolment, accepted: Accepted) -> dict[str, Any]:
    """An accepted answer's report for machines."""
    return {
        "federation": place.federation,
        "name": place.name,
        "kit": str(place.kit),
        "authority": accepted.authority,
        "expires": accepted.kit.expires(),
        "version": accepted.kit.members().version,
        "renewed": accepted.before is not None,
    }


def accepted_text(place: Enrolment, accepted: Accepted) -> Iterator[str]:
    """An accepted answer's report for people."""
    new = accepted.kit
    members = accepted.kit.members()
    yield (
        f"{place.kit}: until {new.expires():%Y-%m-%d}, federation {new.federation}, version "
        f"{members.version}"
    )
    if accepted.before:
        yield "whoever uses it goes on with it from the next start on"
    else:
        yield (
            f"fingerprint of the authority: {accepted.authority}; compare it by telephone before "
            "you use the kit"
        )
    if place.name in members.nodes:
        yield f"lines: {place.trust} (edge-node serve --trust)"
    next_command = _NEXT.get(place.name, "edge-node join --kit {kit} --data images/")
    yield f"next: {next_command.format(kit=place.kit)}"
