"""A file of options drives the command as they would on the command line;
the example of one has them all.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.protocol.errors import UsageError
from edge.config import options_file
from edge.config.options_file import settings
from edge.daemon import line_settings
from edge.daemon.line_settings import TABLES, parse
from edge_node.cli.line import load_serve_settings
from edge_node.cli.main import app, command_tree
from tests.support.plants import CLASSES, draw, here, run, start
from tests.support.tiny_bundle import tiny_bundle

COMMANDS = command_tree(app).commands
EXAMPLE = Path(options_file.__file__).with_name("line.example.toml")


def params(command: str, *words: object) -> dict[str, Any]:
    """What a command is called with, given these words."""
    found = COMMANDS[command].make_context(command, list(map(str, words))).params
    return {key: value for key, value in found.items() if key != "config"}


# The example of a line's settings


def uncommented() -> str:
    """The example with every key and table in use."""
    return re.sub(r"^#(?=[a-z[])", "", EXAMPLE.read_text(), flags=re.MULTILINE)


def test_the_example_is_read_as_it_stands() -> None:
    found = params("serve", "--config", EXAMPLE)
    assert found["bundle"] == EXAMPLE.parent / "bundles" / "plant-a"
    options, tables = load_serve_settings(EXAMPLE)
    assert options["watch"] == EXAMPLE.parent / "camera"
    assert len(tables.sources) == 1


def test_a_key_that_had_another_name_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "line.toml"
    file.write_text('memory = "kept"\n')
    assert params("serve", "--config", file)["state"] == tmp_path / "kept"


def test_all_that_the_example_shows_in_comments_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "line.toml"
    file.write_text(uncommented())
    options, tables = load_serve_settings(file)
    assert options["allow_host"] == ["line-1.plant.local"]
    assert len(tables.sinks) == len(tomllib.loads(uncommented())["sinks"]) + 2, (
        "with --output and --mqtt"
    )
    assert tables.keep
    assert tables.keep.path == str(tmp_path / "to-label")


def test_the_example_shows_every_option_table_and_kind_of_source_and_sink_of_the_kernel() -> None:
    shown = tomllib.loads(uncommented())
    assert settings(COMMANDS["serve"]).keys() | set(TABLES) == shown.keys()
    for tables, kinds in (("sources", line_settings.Source), ("sinks", line_settings.Sink)):
        assert {each["kind"] for each in shown[tables]} == {
            kind.__struct_config__.tag
            for kind in kinds.__args__
            if kind.__module__.startswith("edge.")
        }


@pytest.mark.parametrize(
    "table", ["view", "prior", "spool", "doubt", "drift", "keep", "labels", "gate", "log"]
)
def test_the_example_shows_every_key_of_a_table(table: str, tmp_path: Path) -> None:
    shown = tomllib.loads(uncommented())
    found = getattr(
        parse({key: value for key, value in shown.items() if key in TABLES}, tmp_path / "l.toml"),
        table,
    )
    assert set(found.__struct_fields__) == shown[table].keys()


def test_the_options_that_the_example_shows_with_their_defaults_have_these() -> None:
    defaults, shown = params("serve"), tomllib.loads(uncommented())
    names = ("line", "host", "port", "accept-older")
    assert [shown[name] for name in names] == [defaults[name.replace("-", "_")] for name in names]


def test_the_help_of_serve_says_where_the_example_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert str(EXAMPLE) in here("serve", "--help").stdout


def test_labels_are_given_to_images_that_are_kept() -> None:
    with pytest.raises(UsageError, match=r"\[labels\].*\[keep\]"):
        parse({"labels": {"path": "images"}}, Path("/etc/line.toml"))


# A file of options


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        (
            "coordinate",
            'broker = "mqtt://b"\nclasses = "a,b"\nnodes = 3\njson = true\n'
            'option = ["lambda=0.1", "play=alternating"]\n',
            "mqtt://b --classes a,b --nodes 3 --option lambda=0.1 --option play=alternating --json",
        ),
        (
            "join",
            'broker = "mqtts://plant@b"\nname = "plant-a"\ndata = "/images"\n',
            "mqtts://plant@b --name plant-a --data /images",
        ),
        (
            "serve",
            'bundle = "/bundle"\nwatch = "/camera"\nport = 0\naccept-older = true\nmqtt = ""\n',
            "/bundle --watch /camera --port 0 --accept-older",
        ),
    ],
)
def test_a_file_says_the_same_as_the_command_line(
    command: str, text: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "options.toml"
    file.write_text(text)
    assert params(command, "--config", file) == params(command, *words.split())


def test_the_command_line_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('broker = "mqtt://b"\nname = "plant-a"\ndata = "images"\n')
    found = params("join", "mqtt://else", "--name", "plant-b", "--config", file)
    assert (found["broker"], found["name"], found["data"]) == (
        "mqtt://else",
        "plant-b",
        tmp_path / "images",
    )


def test_relative_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text(
        'broker = "mqtt://b"\nclasses = "a,b"\nnodes = 2\nca = "ca.pem"\nweights = '
        '"w.safetensors"\n'
    )
    found = params("coordinate", "--config", file, "--cert", "here.pem")
    assert found["ca"] == tmp_path / "ca.pem"
    assert found["weights"] == str(tmp_path / "w.safetensors")
    assert found["cert"] == Path("here.pem")
    file.write_text(
        file.read_text().replace("w.safetensors", "none").replace("ca.pem", "/etc/ca.pem")
    )
    found = params("coordinate", "--config", file)
    assert (found["weights"], found["ca"]) == ("none", Path("/etc/ca.pem"))


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("nodse = 2", "'nodse'", "did you mean 'nodes'?"),
        ("[coordinator]\nnodes = 2", "'coordinator'", "--help"),
        ('nodes = "2"', 'nodes = "2"', "a whole number"),
        ("nodes = 2.5", "nodes = 2.5", "a whole number"),
        ("nodes = true", "nodes = true", "a whole number"),
        ("json = 1", "json = 1", "true or false"),
        ("classes = 7", "classes = 7", "a text in quotes"),
        ("state = []", "state = []", "a text in quotes"),
        ('option = "lambda=1"', "option", "a list of texts"),
        ("option = [1]", "option", "a list of texts"),
        ("seed = 1979-05-27", "1979-05-27", "a whole number"),
        ("nodes = 0", "nodes = 0", "another nodes"),
        ("nodes = 2\nclasses = a,b", "line 2, column 11", "quotes"),
        ("nodes = 2\nnodes = 3\n", "line 2", "line of its own"),
        (b"\xff", "UTF-8", "UTF-8"),
        (None, "cannot be read", "--config FILE"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_remedy(
    text: str | bytes | None, what: str, remedy: str, tmp_path: Path
) -> None:
    file = tmp_path / "coordinator.toml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        params("coordinate", "--config", file)
    assert str(file) in caught.value.what
    assert what in caught.value.what
    assert remedy in caught.value.remedy


def test_what_the_file_leaves_out_is_still_asked_for(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('broker = "mqtt://broker.local"\n')
    result = run("join", "--config", tmp_path / "node.toml")
    assert result.returncode == 2
    assert "--data" in result.stderr


# The commands


@pytest.mark.slow
def test_a_federation_runs_from_files_alone(mosquitto: EmbeddedBroker, tmp_path: Path) -> None:
    plants = ("plant-a", "plant-b")
    for number, name in enumerate(plants):
        draw(tmp_path / name / "images", 8, number)
        (tmp_path / name / "node.toml").write_text(
            f'broker = "{mosquitto.url}"\nname = "{name}"\ndata = "images"\nstate = '
            f'"edge-node-{name}"\n'
        )
    (tmp_path / "coordinator.toml").write_text(
        f'broker = "{mosquitto.url}"\nclasses = "{",".join(CLASSES)}"\nnodes = 2\n'
        'model = "small"\nsize = 32\nrounds = 1\nstate = "coordinator-state"\n'
    )
    files = {"coordinate": tmp_path / "coordinator.toml"} | {
        name: tmp_path / name / "node.toml" for name in plants
    }
    processes = {
        name: start(
            "coordinate" if name == "coordinate" else "join",
            "--config",
            file,
            log=tmp_path / f"{name}.log",
        )
        for name, file in files.items()
    }
    try:
        codes = {name: process.wait(120) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    assert set(codes.values()) == {0}, [(tmp_path / f"{name}.log").read_text() for name in files]
    assert (tmp_path / "coordinator-state" / "global.safetensors").exists()
    for name in plants:
        assert (tmp_path / name / f"edge-node-{name}" / "model" / "personal.safetensors").exists()


@pytest.mark.slow
def test_a_line_runs_from_its_file(tmp_path: Path) -> None:
    tiny_bundle(tmp_path / "bundles" / "tiny")
    (tmp_path / "line.toml").write_text('bundle = "bundles/tiny"\nport = 0\n')
    log = tmp_path / "log"
    process = start("serve", "--config", tmp_path / "line.toml", log=log)
    try:
        while "ready http://127.0.0.1:" not in log.read_text():
            assert process.poll() is None, log.read_text()
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
