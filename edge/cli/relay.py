"""Command of a relay: `relay`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import COORDINATOR
from edge.cli.help_panels import Panel
from edge.cli.option_structs import take_options
from edge.cli.shared_options import (
    BrokerOptions,
    OutputOptions,
    PlainConfig,
    RoundOptions,
    open_kit,
    parse_counts,
    reconcile_with_kit,
    stop_on_signals,
)

if TYPE_CHECKING:
    from broker_config.mqtt.endpoint import Endpoint

app = typer.Typer()


class RelayOptions(Struct, frozen=True, kw_only=True):
    """The region, who takes part in it, and where its broker is."""

    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the region, relays among them.", show_default=False)]
    name: Annotated[
        str | None, typer.Option(help="This relay's name in the federation above.", show_default="the kit's")
    ] = None
    region: Annotated[
        str | None, typer.Option(help="Name of the region, which its nodes join.", show_default="the region's kit's")
    ] = None
    federation: Annotated[str | None, typer.Option(help="Name of the federation above, if its broker has several.")] = (
        None
    )
    subregion: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=NODES", help="The region's node NAME is a relay, and stands for so many nodes. Repeatable."
        ),
    ] = []
    state: Annotated[
        Path | None, typer.Option(help="Folder for this relay's state.", show_default="edge-node-relay-NAME")
    ] = None
    wait: Annotated[float, typer.Option(help="Seconds to wait for the coordinator above.")] = 600
    region_broker: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The region's broker.", show_default="that of its kit; the one of the federation above"
        ),
        Panel.BROKER,
    ] = None
    region_kit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The kit of the region's coordinator. Its passphrase comes from EDGE_NODE_REGION_PASSPHRASE.",
        ),
        Panel.BROKER,
    ] = None
    bridged: Annotated[
        bool,
        typer.Option(
            "--bridged", help="Reach the federation above through the region's broker, which has a bridge to its own."
        ),
        Panel.BROKER,
    ] = False
    config: PlainConfig = None


@app.command(
    epilog="Example: edge-node relay mqtt://broker.local --name north --region north-plants --nodes 40 "
    "--region-broker mqtt://north.local"
)
@take_options
def relay(broker: BrokerOptions, output: OutputOptions, options: RelayOptions, round_options: RoundOptions) -> None:
    """Coordinate a region's nodes, and take part in a federation with the exact sums of what they contribute.

    BROKER_URL is the broker of the federation above. If stopped or killed, it resumes when it is started again.
    """
    from trainer import progress
    from trainer.federation.region.relay import RegionRequest
    from trainer.federation.region.relay import relay as run

    above, below = _endpoints(broker, options)
    name = reconcile_with_kit(options.name, above, "name")
    federation = reconcile_with_kit(options.federation, above, "federation")
    region = reconcile_with_kit(options.region, below, "federation")
    if name is None or region is None:
        raise UsageError(
            "the relay's name, or that of its region, is missing", "give both: --name NAME --region NAME, or two kits"
        )
    request = RegionRequest(
        region,
        options.nodes,
        round_options.participation(),
        parse_counts(options.subregion, "--subregion"),
        round_options.linger,
    )
    stop = stop_on_signals()
    if options.bridged:
        above = replace(below, signer=above.signer)
    with output.reporter() as report:
        result = run(
            above,
            below,
            request,
            name=name,
            state=options.state or Path(f"edge-node-relay-{name}"),
            federation=federation,
            wait=options.wait,
            report=report,
            stop=stop,
        )
        if result:
            report(progress.Result(result={"model": str(result)}))
    if result is None:
        print("suspended; the region's nodes wait. The same command goes on.", file=sys.stderr)
        raise typer.Exit(130)
    if not output.as_json:
        print(f"global model: {result}")


def _endpoints(broker: BrokerOptions, options: RelayOptions) -> "tuple[Endpoint, Endpoint]":
    """The brokers of the federation above and of the region, with our identities there."""
    from broker_config.mqtt.endpoint import Endpoint
    from broker_config.security.secret_environment import REGION_PASSPHRASE

    above = broker.node_endpoint()
    if bool(above.kit) != bool(options.region_kit):
        raise UsageError(
            "one of the relay's two kits is missing",
            "pass both: --kit, of a node of the federation above, and --region-kit, of the region's coordinator",
        )
    if options.region_kit is None:
        url = options.region_broker
        return above, Endpoint.parse(url, ca=broker.ca, cert=broker.cert, key=broker.key) if url else above
    kit = open_kit(options.region_kit, REGION_PASSPHRASE)
    if kit.name != COORDINATOR:
        raise UsageError(f"this region's kit is that of {kit.name}", f"take that of its {COORDINATOR}")
    return above, Endpoint.from_kit(kit, options.region_broker)
