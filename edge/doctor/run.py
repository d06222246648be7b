"""All checks, one after the other."""

from collections.abc import Callable, Iterator

from broker_config.protocol.errors import BrokerError, EdgeNodeError
from edge.doctor import access_check, connection_check, kit_check, machine_check, storage_check, traffic_check
from edge.doctor.check_context import Trial
from edge.doctor.probe_connection import LostError
from edge.doctor.result import Check, Found

Examine = Callable[[Trial], Found]

REACH: tuple[Examine, ...] = (
    connection_check.address,
    connection_check.connection,
    kit_check.certificate,
    connection_check.encryption,
    connection_check.login,
)
BROKER: tuple[Examine, ...] = (
    connection_check.version,
    kit_check.charter,
    connection_check.federations,
    access_check.access,
    access_check.protection,
)
ECHOES: tuple[Examine, ...] = (  # need that we read what we write
    traffic_check.packets,
    traffic_check.latency,
    traffic_check.throughput,
    storage_check.retained,
    storage_check.session,
    storage_check.queue,
    storage_check.redelivery,
    storage_check.will,
)
KIT: tuple[Examine, ...] = (kit_check.certificate, kit_check.charter)  # of the above, for whoever has one
LOCAL: tuple[Examine, ...] = (machine_check.clock, machine_check.disk, machine_check.python)
UNREACHABLE = BrokerError.exit_code


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
