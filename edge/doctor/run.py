"""Runner of the checks: their order, which are skipped when earlier ones have failed,
and what is printed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from broker_config.protocol.errors import BrokerError, EdgeNodeError, replace_unprintable
from edge.doctor import access_check, broker_check, connection_check, machine_check
from edge.doctor.probe import CheckContext, LostError, Outcome, Result

CheckFunction = Callable[[CheckContext], Result]

REACH: tuple[CheckFunction, ...] = (
    connection_check.address,
    connection_check.connection,
    connection_check.certificate,
    connection_check.encryption,
    connection_check.login,
)
BROKER: tuple[CheckFunction, ...] = (
    connection_check.version,
    connection_check.charter,
    connection_check.federations,
    access_check.access,
    access_check.protection,
)
LOOPBACK: tuple[CheckFunction, ...] = (  # these need to read back what they write
    broker_check.packets,
    broker_check.latency,
    broker_check.throughput,
    broker_check.retained,
    broker_check.session,
    broker_check.queue,
    broker_check.redelivery,
    broker_check.will,
)
KIT: tuple[CheckFunction, ...] = (
    connection_check.certificate,
    connection_check.charter,
)  # those of the above that need a kit
LOCAL: tuple[CheckFunction, ...] = (machine_check.clock, machine_check.disk, machine_check.python)
UNREACHABLE = BrokerError.exit_code
_STYLES: dict[Outcome, str] = {
    "failure": "bold red",
    "warning": "yellow",
    "unknown": "cyan",
    "ok": "green",
}


class Diagnosis(msgspec.Struct, frozen=True):
    """All results, for machines."""

    broker: str
    name: str  # of the member whose topics were tested
    federation: str  # in which they were tested; nothing is left there
    checks: list[Result]


def run_checks(
    context: CheckContext, on_begin: Callable[[str], None] = lambda _: None
) -> Iterator[Result]:
    """Run all checks and yield each result; `on_begin` gets the name first.

    Checks without a basis are skipped.
    """
    reached = True
    for group in (REACH, BROKER, LOOPBACK, LOCAL):
        for check in group:
            if (group in (REACH, BROKER) and not reached) or (
                group is LOOPBACK and not context.echoes
            ):
                continue
            if check in KIT and context.endpoint.kit is None:
                continue
            name = check.__name__
            on_begin(name)
            result = _run(check, context)
            reached &= group is not REACH or result.outcome != "failure"
            yield msgspec.structs.replace(result, name=name)


def _run(check: CheckFunction, context: CheckContext) -> Result:
    try:
        return check(context)
    except EdgeNodeError as error:
        return Result("failure", error.what, error.remedy)
    except LostError as lost:
        return Result("failure", f"the broker ended the connection: {lost}", "look into its log")


def exit_code(checks: list[Result]) -> int:
    """0 if nothing failed, UNREACHABLE if the broker is out of reach or does not let us in,
    else 1.
    """
    failed = {each.name for each in checks if each.outcome == "failure"}
    if failed & {check.__name__ for check in REACH}:
        return UNREACHABLE
    return 1 if failed else 0


def diagnose(context: CheckContext) -> Diagnosis:
    """Run all checks, and return their results."""
    return Diagnosis(
        str(context.endpoint), context.name, context.federation, list(run_checks(context))
    )


def print_live(context: CheckContext, console: Console) -> list[Result]:
    """Run all checks, and print a row for each as it ends."""
    checks = []
    console.print(f"{context.endpoint}, as {context.name}", markup=False, highlight=False)
    with console.status("") as status:
        for check in run_checks(context, lambda name: status.update(f"{name} ...")):
            console.print(_row(check))
            checks.append(check)
    console.print(summarise(checks), highlight=False)
    return checks


def _row(check: Result) -> Table:
    line = Table.grid(Column(width=8), Column(width=12), Column(overflow="fold"), padding=(0, 1))
    text = Text(replace_unprintable(check.found))
    if check.remedy:
        text.append(replace_unprintable(f"\nWhat to do: {check.remedy}"), style="dim")
    line.add_row(Text(check.outcome, _STYLES[check.outcome]), Text(check.name), text)
    return line


def summarise(checks: Sequence[Result]) -> str:
    """The number of checks with each outcome, the worst first."""
    counts = Counter(check.outcome for check in checks)
    return ", ".join(
        f"{count} {outcome}{'s' * (count > 1 and outcome in ('failure', 'warning'))}"
        for outcome in _STYLES
        if (count := counts[outcome])
    )
