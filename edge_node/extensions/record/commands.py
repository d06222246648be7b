"""Commands for auditors: `record`, `card`, `verify`."""

from pathlib import Path
from typing import Annotated

import typer

from edge_node.cli.shared_options import Json, KitFile, open_kit

_PANEL = "Setting up and looking after"

app = typer.Typer()


@app.command(
    rich_help_panel=_PANEL,
    epilog="Example: edge-node record coordinator-state --kit coordinator.kit --out steel.record",
)
def record(
    state: Annotated[
        Path, typer.Argument(help="State folder of a coordinator or a line.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="STATE.record")
    ] = None,
    kit: KitFile = None,
    as_json: Json = False,
) -> None:
    """Export the record of a coordinator or a line for an auditor: hash-chained,
    its head signed with --kit.

    Of a coordinator: runs, and who contributed what to which round. Of a line: which bundle it
    served when, and why.
    """
    import msgspec

    from edge_node.extensions.record.record_file import export

    file = out or Path(f"{state.resolve().name}.record")
    opened = open_kit(kit) if kit else None
    head = export(state, file, opened)
    if as_json:
        print(msgspec.json.encode({"record": str(file), "head": head}).decode())
        return
    signature = "signed" if head.signature else "not signed"
    print(f"record: {file}, {head.entries} entries, {signature}")
    print(
        f"head: {head.digest}; whoever keeps it will notice changes: edge-node verify {file} "
        f"--head {head.digest}"
    )


@app.command(rich_help_panel=_PANEL, epilog="Example: edge-node card bundles/plant-a")
def card(
    bundle: Annotated[Path, typer.Argument(help="A bundle folder.", show_default=False)],
) -> None:
    """Print a bundle's model card, in Markdown: use, images, method,
    figures with intervals, limits, hashes.
    """
    from edge.bundle.bundle_format import read_bundle
    from edge_node.extensions.record.model_card import model_card

    print(model_card(read_bundle(bundle)), end="")


@app.command(
    rich_help_panel=_PANEL,
    epilog="Example: edge-node verify bundles/plant-a steel.record --trust plant-a.trust",
)
def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help=(
                "Bundles, exported records, models, state folders of coordinators, nodes and lines."
            ),
            show_default=False,
        ),
    ],
    trust: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A trust file of the federation: verify signatures by it."
        ),
    ] = None,
    head: Annotated[
        list[str],
        typer.Option(
            metavar="HASH", help="Head of a record that somebody has kept: one must have it."
        ),
    ] = [],
    as_json: Json = False,
) -> None:
    """Verify records, bundles and models without a network, also against one another.

    It says what was verified and what could not be. Exit code 1 if something is false.
    """
    import msgspec

    from broker_config.security.trust import read
    from edge_node.extensions.record import offline_verification

    trusted = read(trust) if trust else None
    results = offline_verification.verify(paths, trusted, head)
    for each in results:
        if as_json:
            print(msgspec.json.encode(each.as_object()).decode())
        else:
            print(*each.as_text(), sep="\n")
    code = 1 if any(each.refused for each in results) else 0
    raise typer.Exit(code)
