"""All checks, one after the other."""

from collections.abc import Callable, Iterator

from broker_config.errors import EdgeNodeError, LinkError
from edge.doctor import access, local, membership, reach, storage, traffic
from edge.doctor.check import Check, Found
from edge.doctor.trial import Trial
from edge.doctor.wire import LostError

Examine = Callable[[Trial], Found]

REACH: tuple[Examine, ...] = (
    reach.address,
    reach.connection,
    membership.certificate,
    reach.encryption,
    reach.login,
)
BROKER: tuple[Examine, ...] = (
    reach.version,
    membership.charter,
    reach.federations,
    access.access,
    access.protection,
)
ECHOES: tuple[Examine, ...] = (  # need that we read what we write
    traffic.packets,
    traffic.latency,
    traffic.throughput,
    storage.retained,
    storage.session,
    storage.queue,
    storage.redelivery,
    storage.will,
)
KIT: tuple[Examine, ...] = (membership.certificate, membership.charter)  # of the above, for whoever has one
LOCAL: tuple[Examine, ...] = (local.clock, local.disk, local.python)
UNREACHABLE = LinkError.exit_code


def examine(trial: Trial, begins: Callable[[str], None] = lambda _: None) -> Iterator[Check]:
    """Yield each check as it ends; `begins` hears its name before. What cannot be tried any more is left out."""
    reached = True
    for group in (REACH, BROKER, ECHOES, LOCAL):
        for find in group:
            if (group in (REACH, BROKER) and not reached) or (group is ECHOES and not trial.echoes):
                continue
            if find in KIT and trial.endpoint.kit is None:
                continue
            name = find.__name__
            begins(name)
            found = _try(find, trial)
            reached &= group is not REACH or found.outcome != "failure"
            yield Check(name, found.outcome, found.found, found.remedy, found.figures)


def _try(find: Examine, trial: Trial) -> Found:
    try:
        return find(trial)
    except EdgeNodeError as error:
        return Found("failure", error.what, error.remedy)
    except LostError as lost:
        return Found("failure", f"the broker ended the connection: {lost}", "look into its log")


def exit_code(checks: list[Check]) -> int:
    """0 if nothing failed, UNREACHABLE if the broker is out of reach or does not let us in, else 1."""
    failed = {each.name for each in checks if each.outcome == "failure"}
    if failed & {find.__name__ for find in REACH}:
        return UNREACHABLE
    return 1 if failed else 0
