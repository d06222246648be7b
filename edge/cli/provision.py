"""Who may join a federation: `provision`."""

from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import Json

app = typer.Typer()


@app.command(epilog="Example: edge-node provision steel --nodes plant-a,plant-b --host broker.local")
def provision(
    federation: Annotated[str, typer.Argument(help="Its name.", show_default=False)],
    nodes: Annotated[str, typer.Option(metavar="NAME,NAME", help="Nodes that may join; more can be added later.")] = "",
    host: Annotated[
        list[str],
        typer.Option(
            help="Name or address at which the broker is reached; may be given several times, kits name the first.",
            show_default="as before",
        ),
    ] = [],
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of the broker.", show_default="as before; 8883")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all files.", show_default="./FEDERATION")] = None,
    broker_folder: Annotated[
        Path | None,
        typer.Option(help="Where broker/ will lie on the broker's machine.", show_default="as before; where it is"),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="That new certificates hold.")] = 365,
    renew: Annotated[
        list[str], typer.Option(metavar="NAME", help="Give a member, or broker, a new certificate. Repeatable.")
    ] = [],
    renew_due: Annotated[bool, typer.Option("--renew-due", help="The same for all that end within 90 days.")] = False,
    revoke: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="Throw a node out; coordinator and monitor get new keys. Repeatable."),
    ] = [],
    as_json: Json = False,
) -> None:
    """Make certificates, keys and the broker's configuration: an encrypted kit file for each member of a federation.

    Run it again to add nodes, renew certificates or revoke them: it says what has changed, and what to do next.
    """
    from datetime import UTC, datetime

    import msgspec

    from broker_config.security.member_registry import Wish
    from broker_config.security.provisioning import provision as run
    from edge.status.provisioning_report import facts, lines

    wish = Wish(
        nodes=[name.strip() for name in nodes.split(",") if name.strip()],
        hosts=host,
        port=port,
        broker_folder=str(broker_folder.absolute()) if broker_folder else None,
        days=days,
        renew=renew,
        renew_due=renew_due,
        revoke=revoke,
    )
    folder = out or Path(federation)
    done = run(folder, federation, wish, datetime.now(UTC))
    if as_json:
        print(msgspec.json.encode(facts(folder, done)).decode())
    else:
        print(*lines(folder, done), sep="\n")
