"""Commands for every role: `request`, `doctor`, `status`, `user`."""

from pathlib import Path
from typing import Annotated

import typer

from edge_node.cli.option_structs import take_options
from edge_node.cli.shared_options import (
    BrokerOptions,
    Json,
    reconcile_with_kit,
    stop_on_signals,
)

app = typer.Typer()


@app.command(
    epilog="Example: edge-node request steel plant-a\n\n"
    "Example: edge-node request steel plant-a --accept plant-a.answer"
)
def request(
    federation: Annotated[str, typer.Argument(help="Name of the federation.", show_default=False)],
    name: Annotated[
        str,
        typer.Argument(help="Name of the node; or coordinator, or monitor.", show_default=False),
    ],
    accept: Annotated[
        Path | None,
        typer.Option(
            metavar="ANSWER",
            help="Complete or renew the kit with what whoever provisions has answered.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for keys and kit.", show_default="./NAME-kit")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a member's keys here, where they are used, and a request for their certificates;
    or accept its answer.

    The private keys are written to an encrypted kit that never leaves this machine. The request
    goes to whoever provisions the federation, by any way: its fingerprint is compared by telephone.
    """
    import msgspec

    from broker_config.security import enrolment
    from edge.status.enrolment_report import (
        accepted_object,
        accepted_text,
        requested_object,
        requested_text,
    )

    place = enrolment.Enrolment(out or Path(f"{name}-kit"), federation, name)
    if accept:
        accepted = enrolment.accept(place, accept)
        facts = accepted_object(place, accepted)
        text = accepted_text(place, accepted)
    else:
        requested = enrolment.request(place)
        facts = requested_object(place, requested)
        text = requested_text(place, requested)
    if as_json:
        print(msgspec.json.encode(facts).decode())
    else:
        print(*text, sep="\n")


@app.command(
    epilog=(
        "Example: edge-node doctor mqtts://plant-a@broker.local --ca ca.pem --state "
        "edge-node-plant-a"
    )
)
@take_options
def doctor(
    broker: BrokerOptions,
    name: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="NODE",
            help="Node to act for, or coordinator.",
            show_default="the kit's or user name, or any",
        ),
    ] = None,
    state: Annotated[
        Path, typer.Option(help="State folder of join or coordinate; it need not exist.")
    ] = Path(),
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for each answer of the broker.")
    ] = 10,
    as_json: Json = False,
) -> None:
    """Test whether a broker and this machine are fit for a federation, and say what to change.

    Federations on the broker go on undisturbed, and nothing is left there. Exit code 1 if something
    is not fit, 69 if the broker is out of reach.
    """
    import secrets
    import signal

    import msgspec
    from rich.console import Console

    from broker_config.protocol.topics import check_name
    from edge.doctor import run
    from edge.doctor.probe import CheckContext

    # ends like Ctrl-C: the broker is left clean
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    endpoint = broker.endpoint(with_signer=False)  # whether its charter holds is one of the checks
    # two doctors under one name would get in each other's way
    anybody = f"node-{secrets.token_hex(4)}"
    me = check_name(
        reconcile_with_kit(name, endpoint, "name") or endpoint.username or anybody,
        "the node's name (--as)",
    )
    with CheckContext(endpoint, me, state, timeout) as context:
        if as_json:
            diagnosis = run.diagnose(context)
            checks = diagnosis.checks
            print(msgspec.json.encode(diagnosis).decode())
        else:
            checks = run.print_live(context, Console())
    raise typer.Exit(run.exit_code(checks))


@app.command(epilog="Example: edge-node status mqtt://broker.local")
@take_options
def status(
    broker: BrokerOptions,
    federation: Annotated[str | None, typer.Option(help="Only this one, with its nodes.")] = None,
    watch: Annotated[
        bool | None,
        typer.Option(
            "--watch/--once",
            help="Follow it to its end, or show it once.",
            show_default="--watch in a terminal",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how a federation is doing: nodes, round, progress, last seen, errors."""
    from itertools import chain

    import msgspec
    from rich.console import Console

    from edge.status.federations import fetch, follow, json_objects
    from edge.status.rendering import render, show_live

    stop = stop_on_signals()
    console = Console(highlight=False)
    endpoint = broker.endpoint()
    monitor = fetch(endpoint, reconcile_with_kit(federation, endpoint, "federation"))
    if watch is None:
        watch = console.is_interactive and not as_json
    changes = follow(endpoint, monitor, stop) if watch else iter(())
    if watch and console.is_interactive and not as_json:
        show_live(monitor, changes, console)
    else:
        for _ in chain([None], changes):
            if as_json:
                print(
                    *(msgspec.json.encode(each).decode() for each in json_objects(monitor)),
                    sep="\n",
                    flush=True,
                )
            else:
                console.print(render(monitor, console))
    if stop():
        raise typer.Exit(130)


@app.command(epilog="Example: edge-node user mia --state coordinator-state")
def user(
    name: Annotated[
        str,
        typer.Argument(help="Who; it stands beside what that person changes.", show_default=False),
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            help="State folder of the line or the coordinator.",
            show_default="that of the line here",
        ),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Let that person log in no more.")
    ] = False,
) -> None:
    """Let a person log in on the pages of a line or a coordinator, to change something there;
    or set a new password.

    The password is asked for, or read from standard input. It holds at once, without a restart.
    """
    import sys

    from edge.http.login import LEAST, Accounts
    from edge_node.cli.line import line_folder

    accounts = Accounts(line_folder(state))
    if remove:
        accounts.remove(name)
        print(f"{name} can log in no more")
        return
    asked = f"Password for {name} ({LEAST} characters or more)"
    if sys.stdin.isatty():
        password = typer.prompt(asked, hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    accounts.set(name, password)
    print(f"{name} can log in; the hash of the password is in {accounts.path}")
