"""What the checks find, as people and machines see it."""

from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from broker_config.protocol.errors import printable
from edge.doctor.check_context import Trial
from edge.doctor.result import Check, Outcome
from edge.doctor.run import examine

_STYLES: dict[Outcome, str] = {"failure": "bold red", "warning": "yellow", "unknown": "cyan", "ok": "green"}


class Diagnosis(msgspec.Struct, frozen=True):
    """All that was found, for machines."""

    broker: str
    name: str  # whose topics were tried
    federation: str  # below which; nothing is left there
    checks: list[Check]


def diagnose(trial: Trial) -> Diagnosis:
    """Examine, and return all that was found."""
    return Diagnosis(str(trial.endpoint), trial.name, trial.federation, list(examine(trial)))


def live(trial: Trial, console: Console) -> list[Check]:
    """Examine, and print a line of the table as each check ends."""
    checks = []
    console.print(f"{trial.endpoint}, as {trial.name}", markup=False, highlight=False)
    with console.status("") as status:
        for check in examine(trial, lambda name: status.update(f"{name} ...")):
            console.print(_line(check))
            checks.append(check)
    console.print(summarise(checks), highlight=False)
    return checks


def _line(check: Check) -> Table:
    line = Table.grid(Column(width=8), Column(width=12), Column(overflow="fold"), padding=(0, 1))
    told = Text(printable(check.found))
    if check.remedy:
        told.append(printable(f"\nWhat to do: {check.remedy}"), style="dim")
    line.add_row(Text(check.outcome, _STYLES[check.outcome]), Text(check.name), told)
    return line


def summarise(checks: Sequence[Check]) -> str:
    """How many checks ended how, the worst first."""
    counts = Counter(check.outcome for check in checks)
    return ", ".join(
        f"{count} {outcome}{'s' * (count > 1 and outcome in ('failure', 'warning'))}"
        for outcome in _STYLES
        if (count := counts[outcome])
    )
