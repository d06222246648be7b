"""Looking after federations: `status`."""

from typing import Annotated

import typer

from edge.commands.options import Broker, Ca, Cert, Json, Key, make_endpoint, stop_on_signals

app = typer.Typer()


@app.command(epilog="Example: edge-node status mqtt://broker.local")
def status(
    broker: Broker,
    federation: Annotated[str | None, typer.Option(help="Only this one, with its nodes.")] = None,
    watch: Annotated[
        bool | None,
        typer.Option(
            "--watch/--once", help="Follow it to its end, or show it once.", show_default="--watch in a terminal"
        ),
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show how a federation is doing: nodes, round, progress, last seen, errors."""
    from itertools import chain

    import msgspec
    from rich.console import Console

    from edge.status import as_builtins, follow, look
    from edge.status_lines import lines, live

    stop = stop_on_signals()
    console = Console(highlight=False, soft_wrap=True)
    endpoint = make_endpoint(broker, ca, cert, key)
    picture = look(endpoint, federation)
    if watch is None:
        watch = console.is_interactive and not as_json
    changes = follow(endpoint, picture, stop) if watch else iter(())
    if watch and console.is_interactive and not as_json:
        live(picture, changes, console)
    else:
        for _ in chain([None], changes):
            if as_json:
                print(
                    *(msgspec.json.encode(as_builtins(view)).decode() for view in picture.views()), sep="\n", flush=True
                )
            else:
                console.print(*lines(picture, console.width), sep="\n")
    if stop():
        raise typer.Exit(130)
