"""`edge-node init`: a few questions, and from their answers the configuration file of a coordinator, node or line."""

import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer

from broker_config.protocol import topics
from broker_config.protocol.errors import UsageError, suggest
from edge.config import options_file
from edge.config.options_file import Setting
from edge.inference.image_decoding import SUFFIXES


class Question(NamedTuple):
    """A question about an option. A proposal of "" leaves the option out; None means that there is no proposal."""

    key: str
    text: str
    propose: Callable[[], str | None]
    check: Callable[[str], object] = lambda _: None  # raises UsageError for an invalid answer


class Role(NamedTuple):
    """Role of a machine in a federation."""

    command: str
    about: str
    questions: tuple[Question, ...]
    kept: Callable[[Mapping[str, object]], dict[str, object]] = lambda _: {}  # set in addition to the answers
    before: Callable[[Mapping[str, object]], str] = lambda _: ""  # a command to run before the role's own
    tables: str = ""  # commented-out tables that the file may also hold


TABLES = """
# Tables, below all options. Sources and sinks may stand several times each; docs/line.md has
# the rest of them.

#[view]
#roi = [200, 0, 1600, 1080]         # left, top, width, height, in the frame's pixels
#tile = 256                         # side of a tile, likewise
#missed_cost = 5.0                  # what a missed defect costs, in false rejects

#[prior]
#untaught = 0.2                     # weight of each class that this plant never taught

#[[sources]]
#kind = "video"                     # or "folder", "mqtt", "opcua", "genicam"
#input = "rtsp://camera.local/stream"

#[[sinks]]
# or "jsonl", "csv", "sqlite", "folder", "webhook", "homeassistant", "sparkplug", "opcua"
#kind = "mqtt"
#url = "mqtt://line@broker.local"

#[keep]                             # images that the model is in doubt about, to be labelled
#path = "in-doubt"

#[labels]                           # and where they go when somebody has labelled them, at /labels/
#path = "images"

#[log]
#level = "info"
"""


def _check_broker(url: str) -> None:
    from broker_config.mqtt.endpoint import Endpoint

    if "@" in url and ":" in url.partition("://")[2].rpartition("@")[0]:
        raise UsageError(
            "a password does not belong into the file", "write user@host, and set EDGE_NODE_PASSWORD where it runs"
        )
    Endpoint.parse(url)


def _check_classes(classes: str) -> None:
    names = [name.strip() for name in classes.split(",") if name.strip()]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(f"{classes!r} are not two or more different classes", "write for example scratches,patches")


def host_name() -> str:
    """The name of this machine, as a node may be called."""
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9_.-]+", "", platform.node())[:64] or "plant-1"


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("*") if path.is_dir() and not path.name.startswith("."))


def _classes(parent: Path) -> list[str]:
    """The names of folders with images in them: those of one plant's classes, or of several plants'."""
    files = (path for pattern in ("*/*", "*/*/*") for path in parent.glob(pattern))
    return sorted({path.parent.name for path in files if path.suffix.lower() in SUFFIXES})


def find_kit(*, node: bool) -> str | None:
    """The only kit in this folder, if it is a node's, or the coordinator's."""
    found = list(Path().glob("*.kit"))
    names = {path.stem for path in found}
    fits = not names & {topics.COORDINATOR, topics.MONITOR} if node else names == {topics.COORDINATOR}
    return str(found[0]) if len(found) == 1 and fits else None


_IN_A_KIT = ("broker", "name", "nodes")
_BROKER = Question("broker", "Address of the broker", lambda: "mqtt://localhost")
ROLES = {
    "coordinator": Role(
        "coordinate",
        "The coordinator of a federation.",
        (
            Question("kit", "Kit of the coordinator", partial(find_kit, node=False)),
            _BROKER,
            Question(
                "classes",
                "Classes that the federation tells apart, separated by commas",
                lambda: ",".join(_classes(Path("images"))) or None,
                _check_classes,
            ),
            Question("nodes", "Number of nodes that take part", lambda: "2"),
        ),
        kept=lambda _: {"state": "coordinator-state"},
    ),
    "node": Role(
        "join",
        "A node, which takes part in a federation with a plant's images.",
        (
            Question("kit", "Kit of this node", partial(find_kit, node=True)),
            _BROKER,
            Question("name", "Name of this node", host_name, topics.check_node),
            Question("data", "Folder of labelled images, one folder a class", lambda: "images"),
        ),
        kept=lambda answers: {"state": f"edge-node-{answers['name']}"} if "name" in answers else {},
        before=lambda answers: f"edge-node check {shlex.quote(str(answers['data']))}",
    ),
    "line": Role(
        "serve",
        "A line, whose images are inspected as they arrive.",
        (
            Question("bundle", "Folder of the model's bundle", lambda: next(map(str, _folders(Path("bundles"))), None)),
            Question("watch", "Folder in which new images appear, if not over HTTP alone", lambda: ""),
        ),
        tables=TABLES,
    ),
}


def init(
    context: typer.Context,
    commands: Mapping[str, Any],
    role: str | None,
    given: Sequence[str],
    out: Path | None,
    *,
    yes: bool,
    force: bool,
) -> list[str]:
    """Ask for what is missing, write the file, and return the commands to run next.

    Args:
        context: of the running command.
        commands: typer's, by name.
        role: one of ROLES, or None to ask.
        given: answers given in advance, KEY=VALUE.
        out: the file; None takes ROLE.toml.
        yes: accept the proposals instead of asking.
        force: replace an existing file.

    Raises:
        UsageError: there is such a file, or an answer is wrong or missing.
    """
    role = role or _ask(_ROLE, str, yes=yes)
    chosen, target = ROLES[role], out or Path(f"{role}.toml")
    if target.exists() and not force:
        raise UsageError(f"{target} exists already", "pass --force to replace it, or --out FILE to write another")
    known = options_file.settings(commands[chosen.command])
    answers = _parse_answers(known, given, context)
    for question in chosen.questions:
        if question.key in answers:
            question.check(str(answers[question.key]))
        elif _is_moot(question, answers):
            continue
        else:
            answers[question.key] = _ask(question, partial(_parse, known, context, question.key), yes=yes)
    answers = chosen.kept(answers) | {key: value for key, value in answers.items() if value != ""}
    before = chosen.before(answers)
    if target.parent.resolve() != Path.cwd():  # answers are relative to here, paths in the file to its folder
        answers = {
            key: str(Path.cwd() / value) if isinstance(value, str) and known[key].is_path(value) else value
            for key, value in answers.items()
        }
    text = options_file.compose(commands[chosen.command], chosen.about, target, answers) + chosen.tables
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}", "pass another --out FILE") from error
    run = f"edge-node {chosen.command} --config {shlex.quote(str(target))}"
    return [command for command in (before, run) if command]


def _is_moot(question: Question, answers: Mapping[str, object]) -> bool:
    """Whether the question can be skipped: a kit answers it, or it asks for a kit and there is none."""
    if question.key == "kit":
        return question.propose() is None
    return question.key in _IN_A_KIT and bool(answers.get("kit"))


def _parse_answers(known: Mapping[str, Setting], given: Sequence[str], context: typer.Context) -> dict[str, object]:
    """The answers given as KEY=VALUE; list options may be repeated."""
    answers: dict[str, object] = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair!r} is not KEY=VALUE", f"write for example --set {pair}=1")
        if key not in known:
            raise UsageError(f"there is no option {key!r} to set", suggest(key, known))
        value = _parse(known, context, key, text)
        earlier = answers.get(key)
        answers[key] = [*earlier, *value] if isinstance(earlier, list) and isinstance(value, list) else value
    return answers


def _parse(known: Mapping[str, Setting], context: typer.Context, key: str, text: str) -> object:
    """A text as the value of an option. Raises UsageError for one that does not fit."""
    setting = known[key]
    if text == "":
        return text  # not given
    if setting.parameter.metavar == "BROKER_URL":
        _check_broker(text)
    try:
        value = setting.parameter.process_value(context, [text] if setting.kind is list else text)
    except typer.BadParameter as error:
        raise UsageError(f"{key} cannot be {text!r}: {error.message}", f"give another {key}") from error
    return list(value) if setting.kind is list else str(value) if setting.kind is Path else value


def _check_role(name: str) -> None:
    if name not in ROLES:
        raise UsageError(f"{name!r} is no role", suggest(name, ROLES))


_ROLE = Question("role", f"What is this machine: {', '.join(ROLES)}", lambda: "node", _check_role)


def _ask(question: Question, accept: Callable[[str], Any], *, yes: bool) -> Any:
    """The answer to a question, converted by `accept`; in a terminal an invalid one is asked for again."""
    proposal = question.propose()
    how = "pass it as the first argument" if question is _ROLE else f"pass --set {question.key}=VALUE"
    while True:
        try:
            text = "" if yes else input(f"{question.text}{f' [{proposal}]' if proposal else ''}: ").strip()
        except EOFError:
            raise UsageError(
                f"there is no answer to {question.text!r}", f"{how}, or --yes to take what is proposed"
            ) from None
        try:
            if not text and proposal is None:
                raise UsageError(f"nothing can be proposed for {question.key} ({question.text})", how)
            answer = text or str(proposal)
            if answer:
                question.check(answer)
            return accept(answer)
        except UsageError as error:
            if yes or not sys.stdin.isatty():
                raise
            print(error)
