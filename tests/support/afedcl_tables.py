"""Tables of AFedCL's experiments, as they are reported and as they are printed."""

from pathlib import Path

from rich.console import Console

from research.afedcl import experiment, reported
from research.afedcl.cell import Finished


def shown(name: str, cells: list[Finished], folder: Path) -> str:
    """The Markdown; what is printed must say the same."""
    console = Console(width=300, record=True, quiet=False, file=(folder / "printed").open("w"))
    report = experiment.report(
        name, [each.cell for each in cells], {each.key: each for each in cells}
    )
    text = report.markdown(reported.TITLES[name])
    for each in report.tables:
        console.print(each.rich())
    printed = console.export_text()
    for table in text.split("\n## ")[1:]:
        for line in table.splitlines()[4:]:
            assert all(
                entry.strip() in printed
                for entry in line.replace("<br>", "|").strip("|").split("|")
            )
    return text


def row(text: str, title: str, name: str) -> list[str]:
    """The entries of a row of the table below a title."""
    table = text.split(f"## {title}\n")[1].split("\n## ", maxsplit=1)[0]
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [entry.strip() for entry in line.strip("|").split("|")][1:]
