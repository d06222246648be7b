"""A further command of a line's bundles: `bundle send`."""

import sys
from typing import Annotated

import typer

from edge_node.cli.bundles import LINE, Bundle, print_answer
from edge_node.cli.shared_options import Ca, Cert, Json, Key

app = typer.Typer(name="bundle")


@app.command(
    epilog="Example: edge-node bundle send bundles/plant-a mqtt://line-box.local --line line-1"
)
def send(
    bundle: Bundle,
    broker: Annotated[
        str,
        typer.Argument(metavar="BROKER_URL", help="The plant's own broker.", show_default=False),
    ],
    line: Annotated[str, typer.Option(help="Name of the line.")] = LINE,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Send a signed bundle to a line over the plant's own broker.

    A federation's broker is refused.
    """
    from broker_config.mqtt.endpoint import Endpoint
    from edge.registry.control_requests import Answer
    from edge_node.extensions.bundle_delivery import bundle_sender

    def show(text: str) -> None:
        print(text, file=sys.stderr)

    said = bundle_sender.send_bundle(
        bundle, Endpoint.parse(broker, ca=ca, cert=cert, key=key), line, show
    )
    done = said.state in ("active", "stored")
    print_answer(
        Answer(done=done, text=said.text, remedy=said.remedy, findings=said.findings),
        as_json=as_json,
    )
