"""Looking after federations and lines: `doctor`, `status`, `install-service`."""

from pathlib import Path
from typing import Annotated

import typer

from broker_config.protocol.errors import UsageError
from edge.cli.options import Broker, Ca, Cert, Json, Key, KitFile, agreed, make_endpoint, pairs, stop_on_signals

app = typer.Typer()


@app.command(epilog="Example: edge-node doctor mqtts://plant-a@broker.local --ca ca.pem --state edge-node-plant-a")
def doctor(
    broker: Broker = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="NODE",
            help="Node to act for, or coordinator.",
            show_default="the kit's or user name, or any",
        ),
    ] = None,
    state: Annotated[Path, typer.Option(help="State folder of join or coordinate, there already or not.")] = Path(),
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for each answer of the broker.")] = 10,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    kit: KitFile = None,
    as_json: Json = False,
) -> None:
    """Try out whether a broker and this machine are fit for a federation, and say what to change.

    Federations on the broker go on undisturbed, and nothing is left there. Exit code 1 if something is not fit, 69 if
    the broker is out of reach.
    """
    import secrets
    import signal

    import msgspec
    from rich.console import Console

    from broker_config.protocol.topics import check_name
    from edge.doctor import output
    from edge.doctor.check_context import Trial
    from edge.doctor.run import exit_code

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: the broker is left clean
    endpoint = make_endpoint(broker, ca, cert, key, kit, sealed=False)  # whether its charter holds is one of the checks
    anybody = f"node-{secrets.token_hex(4)}"  # two doctors under one name would get in each other's way
    me = check_name(agreed(name, endpoint, "name") or endpoint.username or anybody, "the node's name (--as)")
    with Trial(endpoint, me, state, timeout) as trial:
        if as_json:
            diagnosis = output.diagnose(trial)
            checks = diagnosis.checks
            print(msgspec.json.encode(diagnosis).decode())
        else:
            checks = output.live(trial, Console())
    raise typer.Exit(exit_code(checks))


@app.command(epilog="Example: edge-node status mqtt://broker.local")
def status(
    broker: Broker = None,
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
    kit: KitFile = None,
    as_json: Json = False,
) -> None:
    """Show how a federation is doing: nodes, round, progress, last seen, errors; or a line whose sensors learn."""
    from itertools import chain

    import msgspec
    from rich.console import Console

    from edge.status.federations import fetch, follow, json_objects
    from edge.status.rendering import render, show_live

    stop = stop_on_signals()
    console = Console(highlight=False)
    endpoint = make_endpoint(broker, ca, cert, key, kit)
    monitor = fetch(endpoint, agreed(federation, endpoint, "federation"))
    if watch is None:
        watch = console.is_interactive and not as_json
    changes = follow(endpoint, monitor, stop) if watch else iter(())
    if watch and console.is_interactive and not as_json:
        show_live(monitor, changes, console)
    else:
        for _ in chain([None], changes):
            if as_json:
                print(*(msgspec.json.encode(each).decode() for each in json_objects(monitor)), sep="\n", flush=True)
            else:
                console.print(render(monitor, console))
    if stop():
        raise typer.Exit(130)


@app.command(epilog="Example: edge-node install-service --config /etc/edge-node/line.toml")
def install_service(
    config: Annotated[Path, typer.Option(help="The line's settings, as for serve.", show_default=False)],
    name: Annotated[str, typer.Option(help="The service's name.")] = "edge-node",
    user: Annotated[str, typer.Option(help="Unprivileged user that it runs as.")] = "edge-node",
    secret: Annotated[
        list[str],
        typer.Option(
            metavar="VARIABLE=FILE", help="Secret to hand over, e.g. EDGE_NODE_PASSWORD=/etc/edge-node/password."
        ),
    ] = [],
    out: Annotated[
        Path | None, typer.Option(help="The unit file.", show_default="/etc/systemd/system/NAME.service")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the unit file instead.")] = False,
) -> None:
    """Let systemd run the line: checks its settings, and writes a unit file with the rights that they need."""
    from broker_config.protocol.topics import check_name
    from edge.bundle import bundle_format
    from edge.cli.line import serve_with
    from edge.daemon import service_install, systemd_unit

    check_name(name, "the service's name (--name)")
    config = config.absolute()
    given, settings = serve_with(config)
    needs = service_install.needs(config, given, settings, pairs(secret, "--secret"))
    service_install.check(user, needs)
    if given["bundle"]:
        bundle_format.read(Path(given["bundle"]))
    text = systemd_unit.compose(name, user, service_install.program(), needs)
    if dry_run:
        print(text, end="")
        return
    out = out or Path("/etc/systemd/system") / f"{name}.service"
    try:
        out.write_text(text)
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written: {error.strerror}", "run it with sudo, or pass another --out FILE"
        ) from error
    print(f"wrote {out}")
    if given["bundle"]:
        print("each start goes back to this bundle; to go on with what was activated last, take bundle out of the file")
    print(f"next: systemctl daemon-reload && systemctl enable --now {name}; then systemctl status {name}")
