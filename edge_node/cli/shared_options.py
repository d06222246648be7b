"""Options that several commands share, and their conversion to endpoints,
requests and reporters.
"""

import importlib
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from msgspec import Struct
from msgspec.structs import replace

from broker_config.protocol.errors import UsageError
from broker_config.protocol.topics import COORDINATOR, MONITOR
from broker_config.registry import Registry
from edge_node.cli.help_panels import Panel

if TYPE_CHECKING:
    from broker_config.mqtt.client import Endpoint
    from broker_config.protocol.messages import Spec
    from broker_config.security.kit import Kit
    from trainer.federation.server.spec import Participation, Request
    from trainer.progress import Report

Ca = Annotated[
    Path | None,
    typer.Option(help="Certificate authority of the broker (PEM), for mqtts:// and wss://."),
    Panel.BROKER,
]
Cert = Annotated[Path | None, typer.Option(help="This side's certificate (PEM)."), Panel.BROKER]
Key = Annotated[Path | None, typer.Option(help="This side's private key (PEM)."), Panel.BROKER]
KitFile = Annotated[
    Path | None,
    typer.Option(
        "--kit",
        help=(
            "This member's kit (edge-node request, provision). Its passphrase is asked for, or "
            "comes from EDGE_NODE_PASSPHRASE."
        ),
    ),
    Panel.BROKER,
]
Group = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN|FILE.csv",
        help=(
            "Images that train or are held out together, beside look-alikes: a regular "
            "expression on file names, whose parentheses (else the whole match) name the group, "
            "or a CSV file with the columns file,group."
        ),
        show_default=False,
    ),
    Panel.IMAGES,
]


def _named_method(role: str) -> str:
    """Return the method that has a role, read from the source for the same reason."""
    source = (Path(__file__).parents[2] / "trainer" / "methods" / "__init__.py").read_text()
    found = re.search(rf'^{role} = "(\w+)"$', source, re.MULTILINE)
    assert found
    return found[1]


class _LazyName:
    """A name that is imported when it is needed, as an option's default."""

    def __init__(self, module: str, constant: str):
        self._module = module
        self._constant = constant

    def __str__(self) -> str:
        return str(getattr(importlib.import_module(self._module), self._constant))


def _partition_help() -> str:
    """Read from the first lines of the files, one for each partition, for the same reason."""
    folder = Path(__file__).parents[2] / "trainer" / "data" / "partitions"
    files = [
        file
        for file in sorted(folder.glob("*.py"))
        if file.stem not in ("__init__", "partition_rule")
    ]
    heads = [file.read_text().split('"""', 2)[1].splitlines()[0].rstrip(".") for file in files]
    return (
        "; ".join(
            f"{file.stem}: {head[0].lower()}{head[1:]}"
            for file, head in zip(files, heads, strict=True)
        )
        + "."
    )


METHODS = [*Registry("methods")]
_TRACKERS = ", ".join(Registry("trackers", needed=False)) or "none is installed"
DEFAULT_METHOD = _named_method("RECOMMENDED")
ONE_MESSAGE = _named_method("PREVIEW")
METHOD_NAMES = f"{', '.join(METHODS[:-1])} or {METHODS[-1]}."
Method = Annotated[
    str | None,
    typer.Option(
        help=METHOD_NAMES,
        show_default=(
            f"{ONE_MESSAGE}, one message of sums; {DEFAULT_METHOD} with --rounds or another option "
            "of training"
        ),
    ),
]
WEIGHTS = (
    "Initial weights: imagenet (for efficientnet_lite0 they come with edge-node-weights, others "
    "are downloaded), surface (for mobilenet_v2, from drawn images; come with edge-node-weights), "
    "none, a safetensors FILE (of torchvision's names), or auto: model and weights that suit the "
    "images best (simulate, coordinate)."
)
MODEL_NAMES = (
    "efficientnet_lite0, mobilenet_v2, resnet18 or resnet50, each also with _mid, which takes "
    "features from the middle of the network; small; or another encoder that is installed."
)
SUITED_WEIGHTS = "imagenet; offline, mobilenet_v2 takes surface; none for small"
SIZE = "Width and height of the network's input, pixels."
ROUNDS = "Rounds of training."
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")]
Threads = Annotated[
    int, typer.Option(min=1, help="CPU threads of each training process."), Panel.TRAINING
]
Partition = Annotated[
    str, typer.Option(metavar="NAME[,OPTION=VALUE]", help=_partition_help()), Panel.IMAGES
]
DEFAULT_PARTITION = cast(str, _LazyName("trainer.data.partitions", "DEFAULT"))
Json = Annotated[bool, typer.Option("--json", help="For machines: JSON on standard output.")]
Events = Annotated[
    bool,
    typer.Option(
        "--json",
        help="For machines: events as JSON lines on standard output, the result as the last.",
    ),
    Panel.OUTPUT,
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only the result and errors."), Panel.OUTPUT
]


Http = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Show the federation as a page (edge-node console).",
        show_default="no",
    ),
    Panel.OUTPUT,
]


_TRIES = 3  # of a passphrase
_PATIENCE = 0.8  # seconds for a command to stop by itself


def _read_config(context: typer.Context, file: Path | None) -> Path | None:
    if file is not None:
        from edge.config.options_file import read

        context.default_map = read(file, context)
    return file


def _read_line_config(context: typer.Context, file: Path | None) -> Path | None:
    """As `_read_config`; the file may also have tables,
    which become the Settings in the context's `obj`.
    """
    if file is not None:
        from edge.config.options_file import load, options
        from edge.daemon.exit_codes import sysexits
        from edge.daemon.line_settings import parse

        with sysexits():
            content = load(file)
            tables = {key: value for key, value in content.items() if _is_table(value)}
            given = {key: content[key] for key in content.keys() - tables.keys()}
            context.default_map = options(given, file, context)
            context.obj = parse(tables, file)
    return file


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(each, dict) for each in value)
    )


def _config(text: str, callback: Callable[..., Path | None] = _read_config) -> Any:
    return typer.Option(
        help=f"TOML file with options of this command, {text}", is_eager=True, callback=callback
    )


Config = Annotated[
    Path | None, _config("as NAME = VALUE; the command line overrides it."), Panel.OUTPUT
]
LineConfig = Annotated[
    Path | None,
    _config("and tables for sources, sinks and the rest: docs/line.md.", _read_line_config),
    Panel.OUTPUT,
]


class BrokerOptions(Struct, frozen=True, kw_only=True):
    """How the broker is reached, and who we are there."""

    broker: Annotated[
        str | None,
        typer.Argument(
            metavar="BROKER_URL",
            help=(
                "mqtt://, mqtts://, ws:// or wss://, user@host:port. The password comes from "
                "EDGE_NODE_PASSWORD."
            ),
            show_default="the kit's",
        ),
    ] = None
    ca: Ca = None
    cert: Cert = None
    key: Key = None
    kit: KitFile = None

    def endpoint(self, *, with_signer: bool = True) -> "Endpoint":
        """The broker, with our identity there; `with_signer` as in `Endpoint.from_kit`.

        Raises:
            UsageError: the options contradict each other, or as in `Endpoint.parse` and
                `Endpoint.from_kit`.
        """
        from broker_config.mqtt.endpoint import Endpoint

        if self.kit:
            if self.ca or self.cert or self.key:
                raise UsageError(
                    "a kit holds certificates and key already",
                    "leave out --ca, --cert and --key, or --kit",
                )
            return Endpoint.from_kit(open_kit(self.kit), self.broker, with_signer=with_signer)
        if self.broker is None:
            raise UsageError(
                "the broker's address is missing",
                "write it as mqtt://HOST, or pass a kit: --kit FILE",
            )
        return Endpoint.parse(self.broker, ca=self.ca, cert=self.cert, key=self.key)

    def coordinator_endpoint(self) -> "Endpoint":
        """As `endpoint`; UsageError also if the kit is that of another member than the
        coordinator.
        """
        endpoint = self.endpoint()
        if endpoint.kit and endpoint.kit.name != COORDINATOR:
            raise UsageError(
                f"this kit is that of {endpoint.kit.name}", f"take that of the {COORDINATOR}"
            )
        return endpoint

    def node_endpoint(self) -> "Endpoint":
        """As `endpoint`; UsageError also if the kit is that of the coordinator or the monitor."""
        endpoint = self.endpoint()
        if endpoint.kit and endpoint.kit.name in (COORDINATOR, MONITOR):
            raise UsageError(f"this kit is that of {endpoint.kit.name}", "take a node's")
        return endpoint


class OutputOptions(Struct, frozen=True, kw_only=True):
    """What a command shows while it works."""

    quiet: Quiet = False
    as_json: Events = False

    def reporter(self) -> "AbstractContextManager[Report]":
        """Where its events go."""
        from trainer import progress
        from trainer.methods import headline_metrics

        return progress.reporter(as_json=self.as_json, quiet=self.quiet, headlines=headline_metrics)


class TrackedOutputOptions(OutputOptions, frozen=True, kw_only=True):
    """What a federation shows while it works, and where else its metrics are recorded."""

    track: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=PLACE",
            help=(
                "Record metrics and settings with a tracker, too, in a folder or at a URL. Names: "
                f"{_TRACKERS}. Repeatable."
            ),
        ),
        Panel.OUTPUT,
    ] = []

    @contextmanager
    def reporter(self) -> "Iterator[Report]":
        """As that of `OutputOptions`; UsageError also if a tracker cannot be used."""
        from trainer.progress.trackers import track

        wanted = parse_pairs(self.track, "--track", "{}=runs")
        with super().reporter() as report, track(wanted, report) as tracked:
            yield tracked


class RoundOptions(Struct, frozen=True, kw_only=True):
    """Who takes part in a coordinator's rounds, and when they close."""

    quorum: Annotated[
        int,
        typer.Option(
            min=0,
            help=(
                "Nodes that open the first round (with --sample all do), and contributions that "
                "close one."
            ),
            show_default="all that take part",
        ),
        Panel.ROUNDS,
    ] = 0
    sample: Annotated[
        int,
        typer.Option(min=0, help="Nodes drawn for each round.", show_default="all"),
        Panel.ROUNDS,
    ] = 0
    deadline: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds after which a quorum closes a round.", show_default="none"
        ),
        Panel.ROUNDS,
    ] = 0.0
    linger: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds that the result waits at the end for absent nodes and newcomers."
        ),
        Panel.ROUNDS,
    ] = 60.0

    def participation(self) -> "Participation":
        """Who takes part, and when rounds close."""
        from trainer.federation.server.spec import Participation

        return Participation(self.quorum, self.sample, self.deadline)


class ModelOptions(Struct, frozen=True, kw_only=True):
    """What is trained, and how."""

    rounds: Annotated[
        int | None, typer.Option(min=1, help=ROUNDS, show_default="the method's, 12 or 30")
    ] = None
    method: Method = None
    option: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE",
            help=(
                "An option of the method, e.g. lambda=0.1, dimensions=256 or "
                "others=mobilenet_v2_mid."
            ),
        ),
        Panel.TRAINING,
    ] = []
    head: Annotated[
        Literal["trained", "statistics"],
        typer.Option(
            help=(
                "What classifies in the end: the classifier that the method trains; or one made "
                "of sums of all nodes' features, sent in one more round: it knows all classes, "
                "also where nodes keep their classifiers private."
            )
        ),
        Panel.TRAINING,
    ] = "trained"
    model: Annotated[
        str,
        typer.Option(
            help=MODEL_NAMES, show_default="efficientnet_lite0_mid, or what a method needs"
        ),
    ] = ""
    weights: Annotated[str, typer.Option(help=WEIGHTS, show_default=SUITED_WEIGHTS)] = ""
    size: Annotated[
        int,
        typer.Option(
            help=SIZE, show_default="224 for efficientnet_lite0_mid, else 128; 64 for small"
        ),
        Panel.TRAINING,
    ] = 0
    training: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE",
            help=(
                "learning_rate, local_epochs, batch_size, augment, batch_norm (train, eval), "
                "optimizer (adam, sgd) or moments (keep, reset)."
            ),
        ),
        Panel.TRAINING,
    ] = []
    seed: Seed = 0

    def chosen_model(self) -> str:
        """The model that is named, or the method's."""
        from trainer.federation.server.spec import suited_model

        return self.model or suited_model(
            self.chosen_method(), parse_pairs(self.option, "--option")
        )

    def chosen_method(self) -> str:
        """Return the named method; by default one that trains only if training is asked for."""
        if self.method:
            return self.method
        trains = self.rounds or self.option or self.training or self.head != "trained"
        return DEFAULT_METHOD if trains else ONE_MESSAGE

    def request(self) -> "Request":
        """The federation that the options describe."""
        from trainer.federation.server.spec import Request, check_training
        from trainer.models.initial_weights import choose_weights

        model = self.chosen_model()
        request = Request(
            method=self.chosen_method(),
            options=parse_pairs(self.option, "--option"),
            model=model,
            weights=self.weights or choose_weights(model),
            size=self.size,
            training=parse_pairs(self.training, "--training"),
            rounds=self.rounds or 0,
            seed=self.seed,
            head=self.head,
        )
        check_training(request)
        return request


class RequestOptions(ModelOptions, frozen=True, kw_only=True):
    """All that a federation can be asked for, apart from who takes part."""

    threads: Threads = 1
    aggregate: Annotated[
        Literal["clipped_mean", "mean", "multi_krum"] | None,
        typer.Option(
            help=(
                "How contributions become one model: the weighted mean, with weights and updates "
                "limited to their medians (clipped_mean) or not (mean), or the mean of those "
                "that do not stand alone (multi_krum)."
            ),
            show_default="clipped_mean; mean where a method takes no other",
        ),
        Panel.TRAINING,
    ] = None
    codec: Annotated[
        Literal["none", "int4"] | None,
        typer.Option(
            help=(
                "How what training has changed is coded when it travels, both ways: in four bits "
                "a number, or not."
            ),
            show_default="int4; none where a method takes no other",
        ),
        Panel.TRAINING,
    ] = None
    secure_aggregation: Annotated[
        bool,
        typer.Option(
            "--secure-aggregation",
            help=(
                "Mask what nodes contribute, so that the coordinator can read their sum alone. A "
                "federation needs kits, and two thirds of its nodes in every round; a simulation "
                "comes to the same sums without masks."
            ),
        ),
        Panel.TRAINING,
    ] = False
    privacy: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE",
            help=(
                "Differential privacy of each training image: epsilon=3 for all rounds, or the "
                "noise itself (noise of gradients, sums), and clip=1, the length to which "
                "gradients are cut. Repeatable."
            ),
        ),
        Panel.LEAVES,
    ] = []
    liars: Annotated[
        int,
        typer.Option(min=0, help="Lying nodes that multi_krum allows for.", show_default="1"),
        Panel.TRAINING,
    ] = 0

    def chosen_method(self) -> str:
        """Return the method as `ModelOptions` does; rules and codecs ask for training, too."""
        if self.method is None and (self.aggregate or self.codec or self.liars):
            return DEFAULT_METHOD
        return super().chosen_method()

    def resuming(self, spec: "Spec") -> "RequestOptions":
        """What is left open is as in the run that goes on,
        though it may have begun with another version's defaults.
        """
        return replace(
            self,
            method=self.method or spec.method,
            model=self.model or spec.model,
            size=self.size or spec.preprocessing.size,
            aggregate=self.aggregate or spec.aggregation.rule,
            codec=self.codec or spec.codec,
            secure_aggregation=self.secure_aggregation or spec.mask_threshold > 0,
            privacy=self.privacy or _privacy_of(spec),
        )

    def request(self) -> "Request":
        """As that of `ModelOptions`."""
        return (
            super()
            .request()
            ._replace(
                threads=self.threads,
                aggregate=self.aggregate,
                liars=self.liars,
                codec=self.codec,
                secure_aggregation=self.secure_aggregation,
                privacy=parse_pairs(self.privacy, "--privacy", "epsilon=3"),
            )
        )


def _privacy_of(spec: "Spec") -> list[str]:
    """The options by which a run has its privacy."""
    if spec.privacy is None:
        return []
    settings = {name: getattr(spec.privacy, name) for name in spec.privacy.__struct_fields__}
    return [f"{name}={value!r}" for name, value in settings.items() if value]


def check_model_is_free(wanted: RequestOptions) -> None:
    """Raise UsageError if a model is wanted, or only a method's own will do,
    where `--weights auto` chooses it; or if the choice would tell what shall be hidden.
    """
    from trainer.federation.server.spec import check_choice

    check_choice(wanted.request(), wanted.model)


def report_weights(request: "Request", given: str, show: "Report") -> None:
    """Report the initial weights, if the choice depended on the connection."""
    from trainer.progress import Note

    if not given and request.weights == "surface":
        show(
            Note(
                text=(
                    "ImageNet's weights are out of reach: starting from those that come with "
                    "edge-node (surface); the default model has ImageNet's without a connection"
                )
            )
        )


def parse_pairs(given: list[str], flag: str, like: str = "{}=1") -> dict[str, str]:
    """Texts NAME=VALUE as a mapping.

    Raises UsageError for a malformed one, with an example in the form of `like`.
    """
    for pair in given:
        if "=" not in pair:
            raise UsageError(
                f"{flag} {pair!r} is not NAME=VALUE",
                f"write for example {flag} {like.format(pair)}",
            )
    return dict(pair.split("=", 1) for pair in given)


def open_kit(file: Path) -> "Kit":
    """Open a kit; its passphrase is asked for up to three times,
    unless a variable of the environment has it.

    Raises:
        UsageError: as `kit.read` does.
    """
    from broker_config.security import kit
    from broker_config.security.secret_environment import PASSPHRASE, read_secret

    if file.exists() and file.stat().st_mode & 0o077:
        print(f"{file} can be read by others: chmod 600 {shlex.quote(str(file))}", file=sys.stderr)
    count = 0 if read_secret(PASSPHRASE) else _TRIES - 1
    for _ in range(count):
        try:
            return kit.read(file, kit.ask_passphrase(file))
        except kit.PassphraseError as error:
            print(f"{error.what}; try again", file=sys.stderr)
    return kit.read(file, kit.ask_passphrase(file))


def reconcile_with_kit(
    given: str | None, endpoint: "Endpoint", what: Literal["name", "federation"]
) -> str | None:
    """The value of `what` on the command line or, without one, in the kit.

    Raises:
        UsageError: the two differ.
    """
    if endpoint.kit is None:
        return given
    own: str = getattr(endpoint.kit, what)
    if given not in (None, own):
        raise UsageError(
            f"the kit is for {what} {own!r}, not {given!r}",
            f"leave out --{what}, or take another kit",
        )
    return own


def stop_on_signals(farewell: str = "") -> Callable[[], bool]:
    """Let SIGINT and SIGTERM request that the command stops; a second signal ends it at once.

    With a `farewell`, so does a moment's delay after the first one. A step such as the fit of a
    classifier cannot be interrupted, and a command whose files are whole at any time need not wait
    for it. It says the farewell then.
    """
    requests: list[int] = []

    def request_stop(number: int, _: object) -> None:
        if requests:
            _end_now()
        requests.append(number)
        if farewell:
            timer = threading.Timer(_PATIENCE, _end_now, [farewell])
            timer.daemon = True
            timer.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    return lambda: bool(requests)


@contextmanager
def interrupted_by_keyboard() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt while a question waits for its answer."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_on_signals() -> None:
    """Let SIGINT and SIGTERM end the command at once:
    torch's exporter would answer Ctrl-C with a report.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _end_now())


def _end_now(farewell: str = "") -> None:
    """Exit without unwinding, after showing the cursor again that a live view has hidden."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")
    if farewell:
        os.write(2, f"{farewell}\n".encode())
    os._exit(130)
