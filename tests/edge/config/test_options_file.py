"""A few answers become a commented file, and the file drives the command as its options would."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from broker_config.broker.embedded import EmbeddedBroker
from broker_config.protocol.errors import UsageError
from edge.cli.init_dialogue import ROLES
from edge.cli.main import app, command_tree
from edge.config.line_settings import parse
from tests.support.plants import CLASSES, draw, here, run, start
from tests.support.tiny_bundle import tiny_bundle

COMMANDS = command_tree(app).commands
ANSWERS = {
    "coordinator": {"broker": "mqtt://broker.local", "classes": "a,b", "nodes": "3"},
    "node": {"broker": "mqtts://plant@broker.local", "name": "plant-a", "data": "images"},
    "line": {"bundle": "bundles/plant-a", "watch": "camera"},
}


def init(folder: Path, *arguments: object, stdin: str = "", **answers: object) -> subprocess.CompletedProcess[str]:
    """`edge-node init` in a folder, without a terminal."""
    given = [word for key, value in answers.items() for word in ("--set", f"{key.replace('_', '-')}={value}")]
    with contextlib.chdir(folder):
        return here("init", *arguments, *given, stdin=stdin)


def params(role: str, *words: str) -> dict[str, Any]:
    """What the role's command is called with, given these words."""
    name = ROLES[role].command
    return {
        key: value for key, value in COMMANDS[name].make_context(name, list(words)).params.items() if key != "config"
    }


def typed(role: str, *words: str) -> dict[str, Any]:
    """What the role's command is called with, given its file."""
    return params(role, "--config", f"{role}.toml", *words)


# The dialogue


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, *arguments: str, folder: Path):
        self.seen = ""
        self._file, process_side = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edge.cli.main", *arguments],
            stdin=process_side, stdout=process_side, stderr=process_side, cwd=folder,
        )  # fmt: skip
        os.close(process_side)

    def answer(self, question: str, text: str) -> None:
        """Wait for the question, then type."""
        before = len(self.seen)
        while question not in self.seen[before:]:
            self._read()
        os.write(self._file, f"{text}\n".encode())

    def end(self) -> int:
        """Read to the end; its exit code."""
        while self._read():
            pass
        os.close(self._file)
        return self._process.wait(60)

    def _read(self) -> bool:
        try:
            read = os.read(self._file, 4096)
        except OSError:  # as Linux ends a terminal
            read = b""
        self.seen += read.decode()
        return bool(read)


@pytest.mark.parametrize(("role", "kit"), [("node", "plant-a.kit"), ("coordinator", "coordinator.kit")])
def test_the_only_kit_in_the_folder_is_proposed_to_whom_it_fits(role: str, kit: str, tmp_path: Path) -> None:
    (tmp_path / kit).touch()
    result = init(tmp_path, role, "--yes", **({"classes": "a,b"} if role == "coordinator" else {}))
    assert result.returncode == 0, result.stderr
    written = tomllib.loads((tmp_path / f"{role}.toml").read_text())
    assert written["kit"] == kit
    assert not {"broker", "name", "nodes"} & written.keys(), "these stand in the kit"
    assert "EDGE_NODE_PASSPHRASE" in (tmp_path / f"{role}.toml").read_text()
    (tmp_path / "monitor.kit").touch()  # with two the choice is the user's
    again = init(tmp_path, role, "--yes", "--force", **({"classes": "a,b"} if role == "coordinator" else {}))
    assert again.returncode == 0
    assert "kit" not in tomllib.loads((tmp_path / f"{role}.toml").read_text())


def test_a_dialogue_of_four_questions_writes_the_file_and_says_what_to_type_next(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    terminal = Terminal("init", folder=tmp_path)
    terminal.answer("What is this machine", "")
    terminal.answer("broker [mqtt://localhost]: ", "mqtt://plant@broker.local")
    terminal.answer("Name of this node", "plant-a")
    terminal.answer("images, one folder a class [images]: ", "")
    assert terminal.end() == 0
    assert terminal.seen.count("]: ") == 4
    assert re.search(r"edge-node check images\s+edge-node join --config node.toml", terminal.seen)
    written = tomllib.loads((tmp_path / "node.toml").read_text())
    assert written == {
        "broker": "mqtt://plant@broker.local",
        "name": "plant-a",
        "data": "images",
        "state": "edge-node-plant-a",
    }


def test_a_wrong_answer_is_explained_and_asked_for_again(tmp_path: Path) -> None:
    terminal = Terminal("init", "coordinator", folder=tmp_path)
    terminal.answer("broker [mqtt://localhost]: ", "broker.local")
    terminal.answer("did you mean mqtt://broker.local?", "")
    terminal.answer("Classes", "")
    terminal.answer("Classes", "scratches")
    terminal.answer("Classes", "scratches, patches")
    terminal.answer("nodes", "0")
    terminal.answer("nodes", "5")
    assert terminal.end() == 0
    written = tomllib.loads((tmp_path / "coordinator.toml").read_text())
    assert (written["classes"], written["nodes"]) == ("scratches, patches", 5)


def test_the_class_folders_that_are_there_are_proposed(tmp_path: Path) -> None:
    draw(tmp_path / "images", 1, 0)
    assert init(tmp_path, "coordinator", "--yes").returncode == 0
    assert tomllib.loads((tmp_path / "coordinator.toml").read_text())["classes"] == ",".join(CLASSES)


# Without a terminal


@pytest.mark.parametrize("plants", [("",), ("plant-1", "plant-2")], ids=["one plant's", "several plants'"])
def test_the_classes_that_are_proposed_are_the_folders_with_images(plants: tuple[str, ...], tmp_path: Path) -> None:
    for plant in plants:
        for name in ("scratches", "patches"):
            (tmp_path / "images" / plant / name).mkdir(parents=True)
            (tmp_path / "images" / plant / name / "1.png").touch()
    (tmp_path / "images" / "contact-sheet.png").touch()
    assert init(tmp_path, "coordinator", "--yes").returncode == 0
    assert 'classes = "patches,scratches"' in (tmp_path / "coordinator.toml").read_text()


def test_answers_may_be_piped_and_an_empty_line_takes_what_is_proposed(tmp_path: Path) -> None:
    assert init(tmp_path, stdin="coordinator\n\na,b\n7\n").returncode == 0
    written = tomllib.loads((tmp_path / "coordinator.toml").read_text())
    assert (written["broker"], written["classes"], written["nodes"]) == ("mqtt://localhost", "a,b", 7)


@pytest.mark.parametrize(
    ("words", "stdin", "hint"),
    [
        ((), "", "as the first argument"),
        (("node",), "mqtt://broker.local\n", "--set name=VALUE"),
        (("coordinator", "--yes"), "", "--set classes=VALUE"),
        (("coordinator",), "\n\n\n", "--set classes=VALUE"),
        (("node",), "broker.local\n", "did you mean mqtt://broker.local"),
        (("node", "--set", "broker=mqtt://me:secret@broker.local"), "", "EDGE_NODE_PASSWORD"),
        (("line", "--set", "mqtt=mqtt://me:secret@broker.local"), "", "EDGE_NODE_PASSWORD"),
        (("node", "--set", "name=coordinator", "--yes"), "", "another name"),
        ((), "cordinator\n", "did you mean 'coordinator'?"),
        (("node", "--set", "nmae=a"), "", "did you mean 'name'?"),
        (("node", "--set", "name"), "", "KEY=VALUE"),
        (("coordinator", "--set", "rounds=many"), "", "give another rounds"),
        (("node", "--yes", "--out", "no/such/folder/node.toml"), "", "another --out"),
    ],
)
def test_what_is_missing_or_wrong_is_refused_with_what_to_do(
    words: tuple[str, ...], stdin: str, hint: str, tmp_path: Path
) -> None:
    result = init(tmp_path, *words, stdin=stdin)
    assert result.returncode == 2, result.stdout
    assert hint in result.stderr
    assert "What to do:" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("mine")
    assert "--force" in init(tmp_path, "node", "--yes").stderr
    assert (tmp_path / "node.toml").read_text() == "mine"
    assert init(tmp_path, "node", "--yes", "--force").returncode == 0
    assert "data" in tomllib.loads((tmp_path / "node.toml").read_text())


# The file


@pytest.fixture(params=ROLES)
def role(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A role whose file lies in the current folder."""
    result = init(tmp_path, request.param, **ANSWERS[request.param])
    assert result.returncode == 0, result.stderr
    assert f"edge-node {ROLES[request.param].command} --config {request.param}.toml" in result.stdout
    monkeypatch.chdir(tmp_path)
    return str(request.param)


def words(role: str) -> list[str]:
    """The answers as command line."""
    answers = dict(ANSWERS[role])
    argument = answers.pop("broker", None) or answers.pop("bundle")
    return [argument, *(word for key, value in answers.items() for word in (f"--{key}", value))]


def test_every_option_stands_in_the_file_with_an_explanation(role: str) -> None:
    text = Path(f"{role}.toml").read_text()
    for parameter in COMMANDS[ROLES[role].command].params:
        if parameter.name != "config":
            key = parameter.opts[0].lstrip("-")
            assert re.search(rf"^# .*\S\n#?{key} = ", text, re.MULTILINE), key
            assert " ".join(parameter.help.split()) in re.sub(r"\s*\n# ", " ", text)
    assert max(map(len, text.splitlines())) <= 100


def test_the_file_says_the_same_as_its_answers_on_the_command_line(role: str) -> None:
    expected = params(role, *words(role))
    if role == "node":
        expected["state"] = Path("edge-node-plant-a")
    assert typed(role) == expected


def test_with_everything_uncommented_the_file_says_the_same(role: str) -> None:
    file = Path(f"{role}.toml")
    before = typed(role)
    options = file.read_text().removesuffix(ROLES[role].tables)
    text = re.sub(r"^#(?=[a-z])", "", options, flags=re.MULTILINE)
    assert len(tomllib.loads(text)) == len(before)
    file.write_text(text)
    assert typed(role) == before


def test_with_its_tables_uncommented_a_line_has_a_source_a_sink_and_a_view() -> None:
    tables = tomllib.loads(re.sub(r"^#(?=[a-z[])", "", ROLES["line"].tables, flags=re.MULTILINE))
    found = parse(tables, Path("/etc/line.toml"))
    assert (found.view.tile, len(found.sources), len(found.sinks)) == (256, 1, 1)
    assert found.keep
    assert found.keep.path == "/etc/in-doubt"
    assert found.labels
    assert found.labels.path == "/etc/images"


def test_labels_are_given_to_images_that_are_kept() -> None:
    with pytest.raises(UsageError, match=r"\[labels\] needs the table \[keep\]"):
        parse({"labels": {"path": "images"}}, Path("/etc/line.toml"))


def test_the_command_line_beats_the_file(role: str) -> None:
    if role == "line":
        assert typed(role, "bundles/other", "--watch", "else")["bundle"] == Path("bundles/other")
    else:
        assert typed(role, "mqtt://else")["broker"] == "mqtt://else"


def test_any_option_can_be_set_beforehand(tmp_path: Path) -> None:
    result = init(
        tmp_path, "coordinator", "--set", "option=lambda=0.1", "--set", "option=play=alternating", "--yes",
        classes="a,b", threads=2, json="true",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    written = tomllib.loads((tmp_path / "coordinator.toml").read_text())
    assert written["option"] == ["lambda=0.1", "play=alternating"]
    assert (written["threads"], written["json"]) == (2, True)


def test_odd_characters_in_a_path_survive(tmp_path: Path) -> None:
    odd = 'C:\\plant "ä"\x7f 1 # 2'
    assert init(tmp_path, "node", "--yes", data=odd).returncode == 0
    assert tomllib.loads((tmp_path / "node.toml").read_text())["data"] == odd


def test_relative_paths_start_at_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text('broker = "mqtt://b"\nclasses = "a,b"\nnodes = 2\nca = "ca.pem"\nweights = "w.safetensors"\n')
    found = params("coordinator", "--config", str(file), "--cert", "here.pem")
    assert found["ca"] == tmp_path / "ca.pem"
    assert found["weights"] == str(tmp_path / "w.safetensors")
    assert found["cert"] == Path("here.pem")
    file.write_text(file.read_text().replace("w.safetensors", "none").replace("ca.pem", "/etc/ca.pem"))
    found = params("coordinator", "--config", str(file))
    assert (found["weights"], found["ca"]) == ("none", Path("/etc/ca.pem"))


def test_answers_are_meant_from_where_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    result = init(tmp_path, "node", "--yes", "--out", "etc/node.toml", data="images")
    assert "edge-node check images\n      edge-node join --config etc/node.toml" in result.stdout
    assert tomllib.loads((tmp_path / "etc" / "node.toml").read_text())["data"] == str(tmp_path / "images")


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
        (None, "cannot be read", "edge-node init"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_remedy(
    text: str | bytes | None, what: str, remedy: str, tmp_path: Path
) -> None:
    file = tmp_path / "coordinator.toml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        params("coordinator", "--config", str(file))
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
    coordinator = {"classes": ",".join(CLASSES), "nodes": 2, "model": "small", "size": 32, "rounds": 1}
    plants = ("plant-a", "plant-b")
    for number, name in enumerate(plants):
        draw(tmp_path / name / "images", 8, number)
        assert init(tmp_path / name, "node", "--yes", broker=mosquitto.url, name=name).returncode == 0
    assert init(tmp_path, "coordinator", broker=mosquitto.url, **coordinator).returncode == 0
    files = {"coordinate": tmp_path / "coordinator.toml"} | {name: tmp_path / name / "node.toml" for name in plants}
    processes = {
        name: start("coordinate" if name == "coordinate" else "join", "--config", file, log=tmp_path / f"{name}.log")
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
    assert init(tmp_path, "line", "--yes", port=0).returncode == 0
    log = tmp_path / "log"
    process = start("serve", "--config", tmp_path / "line.toml", log=log)
    try:
        while "ready http://127.0.0.1:" not in log.read_text():
            assert process.poll() is None, log.read_text()
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
