"""Output of the checks, for people and for machines."""

from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from broker_config.protocol.errors import replace_unprintable
from edge.doctor.check_context import CheckContext
from edge.doctor.result import CheckResult, Outcome
from edge.doctor.run import run_checks

_STYLES: dict[Outcome, str] = {"failure": "bold red", "warning": "yellow", "unknown": "cyan", "ok": "green"}


class Diagnosis(msgspec.Struct, frozen=True):
    """All results, for machines."""

    broker: str
    name: str  # of the member whose topics were tested
    federation: str  # in which they were tested; nothing is left there
    checks: list[CheckResult]


def diagnose(context: CheckContext) -> Diagnosis:
    """Run all checks, and return their results."""
    return Diagnosis(str(context.endpoint), context.name, context.federation, list(run_checks(context)))


def print_live(context: CheckContext, console: Console) -> list[CheckResult]:
    """Run all checks, and print a row for each as it ends."""
    checks = []
    console.print(f"{context.endpoint}, as {context.name}", markup=False, highlight=False)
    with console.status("") as status:
        for check in run_checks(context, lambda name: status.update(f"{name} ...")):
            console.print(_row(check))
            checks.append(check)
    console.print(summarise(checks), highlight=False)
    return checks


def _row(check: CheckResult) -> Table:
    line = Table.grid(Column(width=8), Column(width=12), Column(overflow="fold"), padding=(0, 1))
    text = Text(replace_unprintable(check.found))
    if check.remedy:
        text.append(replace_unprintable(f"\nWhat to do: {check.remedy}"), style="dim")
    line.add_row(Text(check.outcome, _STYLES[check.outcome]), Text(check.name), text)
    return line


def summarise(checks: Sequence[CheckResult]) -> str:
    """The number of checks with each outcome, the worst first."""
    counts = Counter(check.outcome for check in checks)
    return ", ".join(
        f"{count} {outcome}{'s' * (count > 1 and outcome in ('failure', 'warning'))}"
        for outcome in _STYLES
        if (count := counts[outcome])
    )
