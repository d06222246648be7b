"""Runner of the checks: their order, and which are skipped when earlier ones have failed."""

from collections.abc import Callable, Iterator

from broker_config.protocol.errors import BrokerError, EdgeNodeError
from edge.doctor import access_check, connection_check, kit_check, machine_check, storage_check, traffic_check
from edge.doctor.check_context import CheckContext
from edge.doctor.probe_connection import LostError
from edge.doctor.result import CheckResult, Result

CheckFunction = Callable[[CheckContext], Result]

REACH: tuple[CheckFunction, ...] = (
    connection_check.address,
    connection_check.connection,
    kit_check.certificate,
    connection_check.encryption,
    connection_check.login,
)
BROKER: tuple[CheckFunction, ...] = (
    connection_check.version,
    kit_check.charter,
    connection_check.federations,
    access_check.access,
    access_check.protection,
)
LOOPBACK: tuple[CheckFunction, ...] = (  # these need to read back what they write
    traffic_check.packets,
    traffic_check.latency,
    traffic_check.throughput,
    storage_check.retained,
    storage_check.session,
    storage_check.queue,
    storage_check.redelivery,
    storage_check.will,
)
KIT: tuple[CheckFunction, ...] = (kit_check.certificate, kit_check.charter)  # those of the above that need a kit
LOCAL: tuple[CheckFunction, ...] = (machine_check.clock, machine_check.disk, machine_check.python)
UNREACHABLE = BrokerError.exit_code


def run_checks(context: CheckContext, on_begin: Callable[[str], None] = lambda _: None) -> Iterator[CheckResult]:
    """Run all checks and yield each result; `on_begin` gets the name first. Checks without a basis are skipped."""
    reached = True
    for group in (REACH, BROKER, LOOPBACK, LOCAL):
        for check in group:
            if (group in (REACH, BROKER) and not reached) or (group is LOOPBACK and not context.echoes):
                continue
            if check in KIT and context.endpoint.kit is None:
                continue
            name = check.__name__
            on_begin(name)
            result = _run(check, context)
            reached &= group is not REACH or result.outcome != "failure"
            yield CheckResult(name, result.outcome, result.found, result.remedy, result.figures)


def _run(check: CheckFunction, context: CheckContext) -> Result:
    try:
        return check(context)
    except EdgeNodeError as error:
        return Result("failure", error.what, error.remedy)
    except LostError as lost:
        return Result("failure", f"the broker ended the connection: {lost}", "look into its log")


def exit_code(checks: list[CheckResult]) -> int:
    """0 if nothing failed, UNREACHABLE if the broker is out of reach or does not let us in, else 1."""
    failed = {each.name for each in checks if each.outcome == "failure"}
    if failed & {check.__name__ for check in REACH}:
        return UNREACHABLE
    return 1 if failed else 0
