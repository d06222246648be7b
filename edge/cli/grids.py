"""What commands that run a grid of cells have in common: `experiment`, `vfl experiment`."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from broker_config.protocol.errors import EdgeNodeError

if TYPE_CHECKING:
    from rich.console import Console

    from trainer import progress

STORE = "Folder of results; what is finished there is not run again."
Store = Annotated[Path, typer.Option(help=STORE)]
Workers = Annotated[int, typer.Option(min=0, help="Processes, a thread each.", show_default="all cores")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what is left to do, and how long it takes.")]


class Grid(Protocol):
    """Cells, some of them finished already."""

    def run(self, show: "progress.Report") -> Sequence[Any]:
        """Run what is missing; returns what failed."""
        ...

    def state(self) -> Any:
        """How far it is."""
        ...

    def describe(self, state: Any) -> str:
        """That in words."""
        ...

    def tell(self, console: "Console") -> list[Path]:
        """Print its tables, draw its figures, return the files."""
        ...


def run_grid(make: Callable[["progress.Report"], Grid], *, dry_run: bool, quiet: bool, as_json: bool) -> None:
    """Run a grid, then tell what came of it; EdgeNodeError if a cell failed."""
    import msgspec
    from rich.console import Console

    from trainer import progress

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    with progress.show(as_json=as_json, quiet=quiet) as show:
        grid = make(show)
        failed = [] if dry_run else grid.run(show)
        state = grid.state()
        files = [] if dry_run else grid.tell(Console(quiet=as_json))
        told = {**msgspec.to_builtins(state), "failed": len(failed), "files": [str(file) for file in files]}
        show(progress.Result(result=told))
    if not as_json:
        print(grid.describe(state), *files, sep="\n")
    if failed:
        none_stored = state.missing == state.cells
        raise EdgeNodeError(
            f"{len(failed)} of {state.cells} cells failed; the first: {failed[0].error}",
            "mend that first, then give the same command again"
            if none_stored
            else "the others are stored; the same command tries these again",
        )
