"""Commands of the line: `serve`, `infer`, `install-service`."""

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from edge_node.cli.help_panels import Panel
from edge_node.cli.option_structs import take_options
from edge_node.cli.shared_options import Ca, Cert, Json, Key, LineConfig, parse_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    T = TypeVar("T")

    from edge.bundle.verification import Verifier
    from edge.daemon.line_settings import Settings

app = typer.Typer()


_log = logging.getLogger(__name__)

TrustFile = Annotated[
    Path | None,
    typer.Option(
        "--trust",
        help=(
            "Load only what this trust file's node has signed, and nothing older than what "
            "was served."
        ),
        metavar="FILE",
    ),
    Panel.BUNDLES,
]

State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        "--memory",
        help=(
            "Folder for bundles and the record of what was served; only the serving process "
            "should write there."
        ),
        show_default="systemd's StateDirectory, else ~/.local/state/edge-node",
    ),
    Panel.BUNDLES,
]

Prior = Annotated[
    list[str],
    typer.Option(
        "--prior",
        metavar="NAME=WEIGHT",
        help=(
            "Weight of a class's probability, e.g. scratches=2; untaught=0.2: of all that this "
            "plant never taught."
        ),
    ),
]


def make_verifier(
    trust: Path | None, state: Path | None, accept_older: bool, *, remembers: bool
) -> "Verifier | None":
    """The verifier that the options ask for, if any."""
    if trust is None:
        if accept_older or (state and not remembers):
            raise UsageError(
                "--state and --accept-older are of use with --trust only", "add --trust FILE"
            )
        return None
    from broker_config.security.trust import read
    from edge.bundle.verification import Verifier

    return Verifier(read(trust), state or state_folder(), accept_older, remembers)


def state_folder() -> Path:
    """Folder for the line's state: the first of systemd's StateDirectory,
    else the one of freedesktop.org.
    """
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.partition(":")[0])
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "edge-node"


def line_folder(given: Path | None) -> Path:
    """Folder for the state of the line here: as given, of the line that runs, or the default.

    Raises:
        UsageError: there are several, and nobody to ask.
    """
    from edge.registry.bundle_store import list_lines, running_lines

    default = state_folder()
    if given:
        return given
    found = sorted({folder for folder, _ in (*running_lines(), *list_lines(default))})
    return choose("lines", found, "--state {}".format) if found else default


def choose(what: str, found: "Sequence[T]", option: "Callable[[T], str]") -> "T":
    """Return the only one of what was found, or ask which is meant.

    Raises:
        UsageError: there are several, and nobody sits at the terminal.
    """
    if len(found) == 1:
        return found[0]
    options = [option(each) for each in found]
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"{len(found)} {what} have their state here", f"say which one: {' or '.join(options)}"
        )
    for number, each in enumerate(options, 1):
        print(f"{number}: {each}", file=sys.stderr)
    chosen = 0
    while not 1 <= chosen <= len(found):
        chosen = typer.prompt("Which one?", type=int, err=True)
    return found[chosen - 1]


class ServeOptions(Struct, frozen=True, kw_only=True):
    """What is served where, and where images come from and verdicts go."""

    bundle: Annotated[
        Path | None,
        typer.Argument(help="A bundle folder.", show_default="the one that was served last"),
    ] = None
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8080
    allow_host: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="Further name by which the line is called, such as a reverse proxy's.",
        ),
    ] = []
    watch: Annotated[Path | None, typer.Option(help="Folder in which new images appear.")] = None
    output: Annotated[Path | None, typer.Option(help="File for verdicts, a JSON line each.")] = None
    mqtt: Annotated[str | None, typer.Option(metavar="BROKER_URL", help="Broker for verdicts.")] = (
        None
    )
    prior: Prior = []
    line: Annotated[str, typer.Option(help="Name of the line, in its MQTT topic.")] = "line-1"
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads.", show_default="2, or the cores there are")
    ] = 0
    ca: Ca = None
    cert: Cert = None
    key: Key = None
    trust: TrustFile = None
    state: State = None
    accept_older: Annotated[
        bool,
        typer.Option(
            "--accept-older",
            help=(
                "Serve this older bundle on purpose; it stays accepted until a newer one is served."
            ),
        ),
        Panel.BUNDLES,
    ] = False
    config: LineConfig = None


_EXAMPLE = Path(__file__).parents[2] / "edge" / "config" / "line.example.toml"


@app.command(
    help="Inspect images as they arrive: over HTTP and from a watched folder.\n\n"
    f"A commented file for --config, to copy and change:\n\n{_EXAMPLE}",
    epilog="Example: edge-node serve bundles/plant-a --trust plant-a.trust --watch camera/",
)
@take_options
def serve(context: typer.Context, options: ServeOptions) -> None:
    """Inspect images as they arrive: over HTTP and from a watched folder."""
    from edge.config.instance import Instance
    from edge.daemon.daemon import serve as run
    from edge.daemon.exit_codes import sysexits

    with sysexits():
        verifier = make_verifier(options.trust, options.state, options.accept_older, remembers=True)
        read_settings = partial(_reread_settings, context) if options.config else None
        code = run(
            options.bundle,
            _merge_settings(options, context.obj),
            Instance(options.line, options.state or state_folder()),
            host=options.host,
            port=options.port,
            allow_hosts=options.allow_host,
            threads=options.threads,
            verifier=verifier,
            read_settings=read_settings,
        )
    raise typer.Exit(code)


# Options that add to the tables: a reload may change them.
_RELOADABLE = ("prior", "watch", "output", "mqtt", "ca", "cert", "key")


def _merge_settings(options: ServeOptions, tables: "Settings | None") -> "Settings":
    """The file's tables, with the weights, sources and sinks that the options add."""
    from edge.daemon.line_settings import Settings, add_options

    settings = _override_prior(tables or Settings(), options.prior)
    return add_options(
        settings, options.watch, options.output, options.mqtt, options.ca, options.cert, options.key
    )


def _override_prior(settings: "Settings", given: list[str]) -> "Settings":
    import msgspec

    prior = settings.prior.override(parse_pairs(given, "--prior", "{}=0.1"))
    return msgspec.structs.replace(settings, prior=prior)


def load_serve_settings(config: Path) -> tuple[dict[str, Any], "Settings"]:
    """Options (by name) and tables of `serve --config`, as the file alone sets them."""
    command: Any = typer.main.get_command(app)
    try:
        context = command.commands["serve"].make_context("serve", ["--config", str(config)])
    except typer.BadParameter as error:
        raise UsageError(
            f"{config}: {error.format_message()}", "see edge-node serve --help"
        ) from error
    return context.params, _merge_settings(ServeOptions(**context.params), context.obj)


def _reread_settings(context: typer.Context) -> "Settings":
    """The settings as if the command were started now;
    warns about changed options that need a restart.

    UsageError when the file cannot be used.
    """
    config = str(context.params["config"])
    try:
        fresh: Any = context.command.make_context(
            context.info_name, ["--config", config], parent=context.parent
        )
    except typer.BadParameter as error:
        raise UsageError(
            f"{config}: {error.format_message()}", "see edge-node serve --help"
        ) from error
    typed = {name: value for name, value in context.params.items() if _is_typed(context, name)}
    params = {**fresh.params, **typed}
    for name, value in params.items():
        if name not in _RELOADABLE and value != context.params[name]:
            _log.warning(
                "%s was changed in the settings: that needs a restart", name.replace("_", "-")
            )
    return _merge_settings(ServeOptions(**params), fresh.obj)


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@app.command(
    epilog=(
        "Example: edge-node infer bundles/plant-a images/ --out results.csv --annotate seen --heat"
    )
)
def infer(
    bundle: Annotated[Path, typer.Argument(help="A bundle folder.", show_default=False)],
    images: Annotated[
        list[Path],
        typer.Argument(
            help="Image files, and folders: all images in them and below.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Results as FILE.jsonl or FILE.csv; images already in it are skipped.",
        ),
    ] = None,
    annotate: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also draw each image with its tiles and verdict."),
    ] = None,
    heat: Annotated[
        bool,
        typer.Option(
            "--heat", help="With --annotate: where each encoder looked, if the bundle supports it."
        ),
    ] = False,
    view: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A line's TOML file: its tables view (region, tiles, threshold) and prior.",
        ),
    ] = None,
    prior: Prior = [],
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads.", show_default="2, or the cores there are")
    ] = 0,
    trust: TrustFile = None,
    state: State = None,
    accept_older: Annotated[
        bool,
        typer.Option(
            "--accept-older", help="Use an older bundle on purpose, for this command only."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Classify image files or whole folders, once;
    tell the accuracy if they are folders named as the model's classes.

    Exit code 2 if an image cannot be read.
    """
    from edge.bundle.expiry import log_warnings
    from edge.daemon import line_settings
    from edge.inference import batch
    from edge.inference.served_model import load_model
    from edge_node.cli.inference_output import classify_and_print

    if heat and not annotate:
        raise UsageError("--heat is of use with --annotate only", "add --annotate FOLDER")
    settings = line_settings.load_verdict_settings(view) if view else line_settings.Settings()
    wanted = _override_prior(settings, prior)
    found = batch.find_images(images)
    model = load_model(bundle, make_verifier(trust, state, accept_older, remembers=False), threads)
    log_warnings(model.expiry_dates)
    results = batch.ResultFile(out, model, wanted.view, wanted.prior) if out else None
    whole = classify_and_print(
        model, found, wanted.view, wanted.prior, results, annotate, heat=heat, as_json=as_json
    )
    code = 0 if whole else UsageError.exit_code
    raise typer.Exit(code)


@app.command(epilog="Example: edge-node install-service --config /etc/edge-node/line.toml")
def install_service(
    config: Annotated[
        Path, typer.Option(help="The line's settings, as for serve.", show_default=False)
    ],
    name: Annotated[str, typer.Option(help="The service's name.")] = "edge-node",
    user: Annotated[str, typer.Option(help="Unprivileged user to run it as.")] = "edge-node",
    secret: Annotated[
        list[str],
        typer.Option(
            metavar="VARIABLE=FILE",
            help="Secret to pass to it, e.g. EDGE_NODE_PASSWORD=/etc/edge-node/password.",
        ),
    ] = [],
    out: Annotated[
        Path | None,
        typer.Option(help="The unit file.", show_default="/etc/systemd/system/NAME.service"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the unit file instead.")
    ] = False,
) -> None:
    """Let systemd run the line: check its settings,
    and write a unit file with the rights that they need.
    """
    from broker_config.protocol.topics import check_name
    from edge.bundle import bundle_format
    from edge.daemon import service_install, systemd_unit

    check_name(name, "the service's name (--name)")
    config = config.absolute()
    given, settings = load_serve_settings(config)
    needs = service_install.find_needs(config, given, settings, parse_pairs(secret, "--secret"))
    service_install.check_access(user, needs)
    if given["bundle"]:
        bundle_format.read_bundle(Path(given["bundle"]))
    text = systemd_unit.compose(name, user, service_install.find_program(), needs)
    if dry_run:
        print(text, end="")
        return
    out = out or Path("/etc/systemd/system") / f"{name}.service"
    try:
        out.write_text(text)
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written: {error.strerror}",
            "run it with sudo, or pass another --out FILE",
        ) from error
    print(f"wrote {out}")
    if given["bundle"]:
        print("the first start serves this bundle, later ones what was activated last")
    print(
        f"next: systemctl daemon-reload && systemctl enable --now {name}; then systemctl status "
        f"{name}"
    )
