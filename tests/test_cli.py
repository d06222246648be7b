"""The command line: help, errors and output, as people and machines see them."""

import importlib.metadata
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from edge.cli import app
from tests.plants import draw, run, start
from tests.tiny_bundle import RED, tiny_bundle

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]
README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough for the default partition."""
    return draw(tmp_path_factory.mktemp("data") / "images", 60, 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_stands_in_the_readme(command: str) -> None:
    result = run(command, "--help", COLUMNS="120")
    assert result.returncode == 0
    assert f"Example: edge-node {command}" in result.stdout
    assert f"edge-node {command}" in README


def test_the_readme_names_no_command_that_does_not_exist() -> None:
    assert set(re.findall(r"edge-node ([a-z]+)", README)) <= {*COMMANDS, "version"}


def test_every_example_in_the_help_is_a_command_line_that_parses() -> None:
    group = typer.main.get_command(app)
    for name in COMMANDS:
        words = group.commands[name].epilog.removeprefix("Example: edge-node ").split()
        assert words[0] == name
        group.commands[name].make_context(name, words[1:])


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['edge-node', '--help']\n"
        "from edge.cli import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'onnxruntime', 'paho', 'starlette', 'PIL') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_simulate_prints_json_and_nothing_else_on_standard_output(images: Path, tmp_path: Path) -> None:
    result = run(
        "simulate", "--data", images, "--model", "small", "--size", 32, "--rounds", 2, "--nodes", 3,
        "--samples", 6, "--seed", 3, "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert [node["name"] for node in report["nodes"]] == ["plant-1", "plant-2", "plant-3"]
    assert {len(node["classes"]) for node in report["nodes"]} == {2}
    assert (report["rounds"], report["seed"]) == (2, 3)
    assert (tmp_path / "out" / "plant-2" / "model" / "personal.safetensors").exists()
    assert "round 2 closed" in result.stderr


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--method", "fedagv"), "did you mean 'fedavg'?"),
        (("--option", "lamda=1"), "did you mean 'lambda'?"),
        (("--option", "lambda"), "NAME=VALUE"),
        (("--model", "mobilnet_v2"), "did you mean 'mobilenet_v2'?"),
        (("--training", "learning_rat=1"), "did you mean 'learning_rate'?"),
        (("--training", "batch_norm=off"), "batch_norm is one of train, eval"),
        (("--weights", "nowhere.safetensors"), "nowhere.safetensors"),
        (("--classes-per-node", "9"), "fewer --classes-per-node"),
        (("--samples", "100000"), "lacks"),
        (("--partition", "fair"), "disjoint, dirichlet and iid"),
    ],
)
def test_a_wrong_value_is_answered_with_the_remedy(flags: tuple[str, ...], hint: str, images: Path) -> None:
    result = run("simulate", "--data", images, "--model", "small", *flags)
    assert result.returncode == 2
    assert hint in result.stderr
    assert "What to do:" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout.strip() == importlib.metadata.version("edge-node")


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in run("--debug", "simulate", "--data", "nowhere").stderr


def test_infer_judges_files_and_reports_those_that_it_cannot(tmp_path: Path) -> None:
    tiny_bundle(tmp_path / "bundle")
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "bad.png").write_bytes(b"no image")
    result = run("infer", tmp_path / "bundle", tmp_path / "red.png")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"\S+red\.png: red \(\d+\.\d%\)\n", result.stdout)
    result = run("infer", tmp_path / "bundle", tmp_path / "red.png", tmp_path / "bad.png", "--json")
    good, bad = map(json.loads, result.stdout.splitlines())
    assert (good["type"], good["label"], bad["type"]) == ("Verdict", "red", "Failure")
    assert result.returncode == 1
    assert run("infer", tmp_path, tmp_path / "red.png").returncode == 1


def test_the_broker_runs_until_it_is_asked_to_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start("broker", "--port", 0, "--folder", tmp_path / "broker", log=log)
    try:
        while "is listening on mqtt://127.0.0.1:" not in log.read_text():
            assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()


def test_the_daemon_runs_from_the_command_line(tmp_path: Path) -> None:
    tiny_bundle(tmp_path / "bundle")
    log = tmp_path / "log"
    process = start("serve", tmp_path / "bundle", "--port", 0, log=log)
    try:
        while "ready http://127.0.0.1:" not in log.read_text():
            assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
