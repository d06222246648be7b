"""The command `audit` of a plant."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from edge_node.cli.help_panels import Panel
from edge_node.cli.node import Alias
from edge_node.cli.option_structs import take_options
from edge_node.cli.shared_options import (
    BrokerOptions,
    Config,
    Group,
    OutputOptions,
    parse_pairs,
    reconcile_with_kit,
    stop_on_signals,
)

if TYPE_CHECKING:
    from edge_node.extensions.audit.audit import Audited

app = typer.Typer()

_STOPPED = "stopped"


class AuditOptions(Struct, frozen=True, kw_only=True):
    """The images that an audit attacks what is made of, and where its page goes."""

    data: Annotated[
        Path,
        typer.Option(help="Folder of labelled images: one folder a class.", show_default=False),
    ]
    state: Annotated[
        Path | None,
        typer.Option(
            help=(
                "State folder of a node: attack what it has sent last, instead of what it "
                "would send."
            )
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="HTML file for the page with pictures.")] = Path(
        "edge-node-audit.html"
    )
    federation: Annotated[
        str | None, typer.Option(help="Name of the federation, if the broker has several.")
    ] = None
    test: Annotated[
        Path | None,
        typer.Option(help="Folder of held-out images, as given to join; for --state."),
        Panel.IMAGES,
    ] = None
    group: Group = None
    alias: Alias = []
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help="Make all steps of the search for images by an update: tens of minutes.",
        ),
    ] = False
    config: Config = None


@app.command(
    epilog="Example: edge-node audit mqtt://broker.local --data images/",
    rich_help_panel="A plant that takes part",
)
@take_options
def audit(broker: BrokerOptions, output: OutputOptions, options: AuditOptions) -> None:
    """Attack, with this plant's own images, what a federation would make it send.

    Nothing leaves the plant.

    Tells how much of counts, membership and pictures of images a curious coordinator gets: as the
    federation works, and as it would with --secure-aggregation or --privacy (epsilon 3). Its
    coordinator must be there. Takes about two minutes.

    With join --demand counts=0.9, --demand membership=0.2 or --demand pictures=0.1 a plant takes
    part only where attacks tell no more than that share.
    """
    from rich.console import Console

    from broker_config.storage.disk import check_file_writable
    from trainer import progress
    from trainer.federation.client.plant_images import PlantImages

    if options.state and (broker.broker or broker.kit):
        raise UsageError(
            "--state audits what a node has sent, which needs no broker",
            "leave out the broker, or leave out --state",
        )
    if not (options.state or broker.broker or broker.kit):
        raise UsageError(
            "there is nothing to audit",
            "name a federation's broker, or a node that has joined one: --state FOLDER",
        )
    check_file_writable(options.out)
    aliases = parse_pairs(options.alias, "--alias", "{}=scratches")
    found = PlantImages.find(options.data, options.test, options.group, aliases)
    stop = stop_on_signals(_STOPPED)
    with output.reporter() as report:
        report(progress.Step(what="loading torch, which takes seconds"))
        from edge_node.extensions.audit import audit_page
        from edge_node.extensions.audit.federation_audit import audit_federation, audit_sent

        if options.state:
            audited: Audited | None = audit_sent(
                options.state, found, report, is_thorough=options.thorough, stop=stop
            )
        else:
            endpoint = broker.node_endpoint()
            audited = audit_federation(
                endpoint,
                found,
                reconcile_with_kit(options.federation, endpoint, "federation"),
                report,
                is_thorough=options.thorough,
                stop=stop,
            )
        if audited:
            audit_page.write(audited, options.out)
            report(progress.Result(result=audit_page.to_result(audited.audit, options.out)))
    if audited is None:
        print(_STOPPED, file=sys.stderr)
        raise typer.Exit(130)
    if not output.as_json:
        audit_page.print_table(audited.audit, Console())
        print(f"page: {options.out}")
