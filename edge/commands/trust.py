"""Who may join a federation: `provision`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.commands.options import Json

if TYPE_CHECKING:
    from broker_config.provision import Provisioned

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

    Run it again to add nodes, renew certificates or revoke them: then all kits are new.
    """
    from datetime import UTC, datetime

    import msgspec

    from broker_config.provision import provision as run
    from broker_config.register import Wish

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
        print(msgspec.json.encode(_facts(folder, done)).decode())
    else:
        print(*_lines(folder, done), sep="\n")


def _facts(folder: Path, done: "Provisioned") -> dict[str, Any]:
    """For machines."""
    register = done.register
    return {
        "federation": register.federation,
        "folder": str(folder),
        "changed": [str(path.relative_to(folder)) for path in done.changed],
        "version": register.version,
        "charter_expires": register.charter_expires,
        "authority_expires": register.ca.expires,
        "broker_expires": register.broker.expires,
        "members": [
            {"name": name, "expires": holder.pair.expires, "kit": f"kits/{name}.kit"}
            for name, holder in register.members.items()
        ],
    }


def _lines(folder: Path, done: "Provisioned") -> list[str]:
    """For people: what there is, and what is next."""
    register = done.register
    width = max(map(len, register.members))
    news = "all kits are new, the coordinator's is needed first" if done.changed else "nothing to change"
    return [
        f"federation {register.federation}, version {register.version}: {news}",
        *(
            f"  {name:{width}}  until {holder.pair.expires:%Y-%m-%d}  {folder}/kits/{name}.kit"
            for name, holder in register.members.items()
        ),
        f"  {'broker':{width}}  until {register.broker.expires:%Y-%m-%d}  {folder}/broker/",
        f"passphrases: {folder}/passphrases.txt (send each by another way than its kit)",
        f"lines: {folder}/trust/NODE.trust until {register.charter_expires:%Y-%m-%d} (edge-node serve --trust)",
        f"offline, with a backup: {folder}/authority/ until {register.ca.expires:%Y-%m-%d}",
        f"next: mosquitto -c {register.broker_folder or (folder / 'broker').resolve()}/mosquitto.conf",
        "      (started by root it becomes user mosquitto, who must be able to read this folder)",
        "      edge-node coordinate --kit coordinator.kit --classes ...",
        f"      edge-node join --kit {next(iter(register.nodes), 'NODE')}.kit --data images/",
    ]
