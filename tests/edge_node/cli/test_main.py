"""The command line: help, errors and output, as people and machines see them."""

import errno
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
from rich.text import Text

from broker_config.protocol.errors import BrokerError, UsageError, explain
from broker_config.protocol.messages import Spec
from edge_node.cli.main import app, command_tree
from edge_node.cli.node import trust_file
from edge_node.cli.shared_options import RequestOptions, check_model_is_free
from tests.support.method_cases import register_method_with_model
from tests.support.paths import REPOSITORY
from tests.support.plants import draw, here, run, start
from tests.support.tiny_bundle import GREEN, RED, png, tiny_bundle
from trainer.data.partitions import PARTITIONS
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Request, draft
from trainer.methods.base import MODEL

COMMANDS = list(command_tree(app).commands)
README = (REPOSITORY / "README.md").read_text()
PAGES = README + "".join(
    path.read_text()
    for path in (REPOSITORY / "docs").glob("*.md")
    if path.stem != "troubleshooting"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough for the default partition."""
    return draw(tmp_path_factory.mktemp("data") / "images", 60, 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_stands_on_a_page(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    result = here(command, "--help")
    assert result.returncode == 0
    assert f"Example: edge-node {command}" in result.stdout
    assert f"edge-node {command}" in PAGES


def test_every_example_in_the_help_is_a_command_line_that_parses() -> None:
    group = command_tree(app)
    bundle = group.commands["bundle"]
    commands = {
        **group.commands,
        **{f"bundle {name}": command for name, command in bundle.commands.items()},
    }
    for name, command in commands.items():
        for example in command.epilog.split("\n\n"):
            words = example.removeprefix("Example: edge-node ").split()
            assert " ".join(words).startswith(name)
            command.make_context(name, words[len(name.split()) :])


def test_no_help_text_loses_words_in_brackets_that_a_terminal_takes_for_markup() -> None:
    def texts(command: click.Command) -> Iterator[str]:
        yield from (text for text in (command.help, command.epilog) if text)
        for parameter in command.params:
            shown = (
                getattr(parameter, "help", None),
                parameter.metavar,
                getattr(parameter, "show_default", None),
            )
            yield from (text for text in shown if isinstance(text, str))
        for each in getattr(command, "commands", {}).values():
            yield from texts(each)

    found = list(texts(command_tree(app)))
    assert len(found) > 300
    assert [text for text in found if Text.from_markup(text).plain != text] == []


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['edge-node', '--help']\n"
        "from edge_node.cli.main import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'onnxruntime', 'paho', 'uvicorn', 'PIL') if "
        "name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("package", ["edge_node.cli.main", "research"])
def test_matrices_are_computed_on_one_thread_unless_the_environment_says_otherwise(
    package: str,
) -> None:
    """More of them wait for one another by spinning,
    which on a busy machine takes longer than the arithmetic.
    """
    code = (
        f"import {package}, numpy, threadpoolctl as t; print([each['num_threads'] for each in "
        "t.threadpool_info()])"
    )
    environment = {name: value for name, value in os.environ.items() if "THREADS" not in name}
    threads = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        ).stdout.strip()
        for env in (environment, {**environment, "OPENBLAS_NUM_THREADS": "2"})
    ]
    assert threads == ["[1]", "[2]"]


def test_simulate_prints_events_as_json_and_its_report_as_the_last(
    images: Path, tmp_path: Path
) -> None:
    result = here(
        "simulate",
        "--data",
        images,
        "--method",
        "afedcl",
        "--model",
        "small",
        "--size",
        32,
        "--rounds",
        2,
        "--nodes",
        3,
        "--samples",
        6,
        "--seed",
        3,
        "--engine",
        "batched",
        "--out",
        tmp_path / "out",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    *events, last = map(json.loads, result.stdout.splitlines())
    assert {"Gathering", "Activity", "Measured", "RoundClosed"} <= {
        event["event"] for event in events
    }
    report = last["result"]
    assert report == json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert [node["name"] for node in report["nodes"]] == ["plant-1", "plant-2", "plant-3"]
    assert {len(node["classes"]) for node in report["nodes"]} == {2}
    assert (report["rounds"], report["seed"], report["engine"], report["device"]) == (
        2,
        3,
        "batched",
        "cpu",
    )
    assert (tmp_path / "out" / "plant-2" / "model" / "personal.safetensors").exists()
    assert result.stderr == ""


def test_simulated_nodes_have_their_images_from_several_sources_under_common_names(
    tmp_path: Path,
) -> None:
    one = draw(tmp_path / "one", 20, 1, classes=("inclusion", "scratches"))
    two = draw(tmp_path / "two", 20, 2, classes=("rust", "slag"))
    result = here(
        "simulate",
        "--data",
        one,
        "--data",
        two,
        "--partition",
        "sources",
        "--alias",
        "slag=inclusion",
        "--nodes",
        2,
        "--model",
        "small",
        "--size",
        32,
        "--rounds",
        1,
        "--samples",
        6,
        "--test-samples",
        4,
        "--pool",
        "all",
        "--quiet",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)["result"]
    assert [node["classes"] for node in report["nodes"]] == [
        ["inclusion", "scratches"],
        ["inclusion", "rust"],
    ]
    assert report["data"] == f"{one}, {two}"


def test_simulated_groups_of_nodes_may_share_some_images_of_each_class(tmp_path: Path) -> None:
    images = draw(tmp_path / "images", 20, 1, classes=("inclusion", "rust", "scratches"))
    result = here(
        "simulate",
        "--data",
        images,
        "--partition",
        "groups",
        "--classes-per-node",
        1,
        "--nodes",
        3,
        "--shared",
        2,
        "--model",
        "small",
        "--size",
        32,
        "--rounds",
        1,
        "--samples",
        6,
        "--test-samples",
        4,
        "--pool",
        "all",
        "--method",
        "fedavg",
        "--quiet",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    nodes = json.loads(result.stdout)["result"]["nodes"]
    assert [(node["classes"], node["images"]) for node in nodes] == [
        (["inclusion", "rust", "scratches"], 12)
    ] * 3


def test_the_help_of_partition_names_them_all_and_their_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    (told,) = [
        line for line in here("simulate", "--help").stdout.splitlines() if "--partition" in line
    ]
    for name, partition in PARTITIONS.items():
        assert f"{name}: " in told
        # the help has it from the file's name
        assert name == partition.__module__.rpartition(".")[2]
        assert all(option in told for option in partition.__struct_fields__)


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--method", "fedagv"), "did you mean 'fedavg'?"),
        (("--method", "afedcl", "--option", "lamda=1"), "did you mean 'lambda'?"),
        (("--method", "fednova", "--training", "learning_rate=0.1"), "--option rate=NUMBER"),
        (("--option", "lambda"), "NAME=VALUE"),
        (("--model", "mobilnet_v2"), "did you mean 'mobilenet_v2'?"),
        (("--training", "learning_rat=1"), "did you mean 'learning_rate'?"),
        (("--training", "batch_norm=off"), "batch_norm is one of train, eval"),
        (("--weights", "nowhere.safetensors"), "nowhere.safetensors"),
        (("--classes-per-node", "9"), "fewer --classes-per-node"),
        (("--samples", "100000"), "lacks"),
        (("--partition", "fair"), "take one of disjoint, dirichlet, "),
        (("--partition", "dirichlet,alhpa=1"), "did you mean 'alpha'?"),
    ],
)
def test_a_wrong_value_is_answered_with_the_remedy(
    flags: tuple[str, ...], hint: str, images: Path
) -> None:
    result = here("simulate", "--data", images, "--model", "small", *flags)
    assert result.returncode == 2
    assert hint in result.stderr
    assert "What to do:" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout.strip() == importlib.metadata.version("edge-node")


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in run("--debug", "infer", "nowhere", "image.png").stderr


def test_infer_judges_files_and_reports_those_that_it_cannot(tmp_path: Path) -> None:
    tiny_bundle(tmp_path / "bundle")
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "bad.png").write_bytes(b"no image")
    result = run("infer", tmp_path / "bundle", tmp_path / "red.png")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"\S+red\.png: red \(\d+\.\d%\), in doubt: blank\n", result.stdout)
    result = here(
        "infer", tmp_path / "bundle", tmp_path / "red.png", tmp_path / "bad.png", "--json"
    )
    good, bad = map(json.loads, result.stdout.splitlines())
    assert (good["type"], good["label"], bad["type"]) == ("Verdict", "red", "Failure")
    assert result.returncode == 2


def test_infer_compares_class_folders_with_their_names(tmp_path: Path) -> None:
    tiny_bundle(tmp_path / "bundle")
    for name, image in (("red/1.png", RED), ("red/2.png", GREEN), ("green/1.png", GREEN)):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_bytes(image)
    result = here("infer", tmp_path / "bundle", tmp_path / "images")
    assert re.search(r"^red +1 +1 +50 %$", result.stdout, re.MULTILINE)
    assert "accuracy 66.7% (21 to 94; 2 of 3), with 95 % intervals" in result.stdout
    result = here("infer", tmp_path / "bundle", tmp_path / "images", "--json")
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["confusion"] == {"green": {"green": 1}, "red": {"red": 1, "green": 1}}
    assert found["accuracy"]["count"] == 2


def test_infer_takes_the_prior_of_a_file_and_of_options_and_marks_what_was_never_taught(
    tmp_path: Path,
) -> None:
    tiny_bundle(tmp_path / "bundle", trained={"red": 4, "blue": 4})
    (tmp_path / "part.png").write_bytes(png((100, 130, 0)))  # green is 3.2 times as likely as red
    (tmp_path / "line.toml").write_text("[prior]\nuntaught = 0.9\n")
    infer = "infer", tmp_path / "bundle", tmp_path / "part.png"
    assert ": red (" in here(*infer).stdout
    untaught = here(*infer, "--view", tmp_path / "line.toml").stdout
    assert re.search(r": green \(\d+\.\d%\), a class that this plant never taught,", untaught)
    assert (
        ": red ("
        in here(*infer, "--view", tmp_path / "line.toml", "--prior", "untaught=0.1").stdout
    )
    wrong = here(*infer, "--prior", "rad=2")
    assert wrong.returncode == 2
    assert "did you mean 'red'?" in wrong.stderr


def test_the_broker_runs_until_it_is_asked_to_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start("broker", "--port", 0, "--folder", tmp_path / "broker", log=log)
    try:
        while "is listening on mqtt://127.0.0.1:" not in log.read_text():
            assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
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
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_export_says_what_it_does_before_it_loads_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from edge_node.cli.main import main; main()"
    command = [sys.executable, "-c", code, "export", tmp_path, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "no personal model" in result.stderr
    (tmp_path / "personal.json").touch()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "torch" in result.stderr  # it cannot be loaded
    assert json.loads(result.stdout)["what"].startswith("loading torch")


# Errors and exit codes


def test_a_bundle_folder_that_is_none_ends_every_command_alike_and_the_likely_ones_are_named(
    tmp_path: Path,
) -> None:
    tiny_bundle(tmp_path / "bundles" / "plant-a")
    for code, *command in (
        (65, "serve", tmp_path / "bundles"),
        (2, "infer", tmp_path / "bundles", "image.png"),
    ):
        result = here(*command)
        assert result.returncode == code
        assert f"did you mean {tmp_path}/bundles/plant-a?" in result.stderr


def test_a_state_folder_given_for_the_model_inside_it_is_put_right(tmp_path: Path) -> None:
    (tmp_path / "plant-a" / "model").mkdir(parents=True)
    (tmp_path / "plant-a" / "model" / "personal.json").touch()
    for given in (tmp_path / "plant-a", tmp_path):
        result = here("export", given)
        assert result.returncode == 2
        assert f"did you mean {tmp_path}/plant-a/model?" in result.stderr


@pytest.mark.parametrize(
    ("wanted", "remedy"),
    [
        (RequestOptions(model="mobilenet_v2"), "leave out one of them"),
        (RequestOptions(method="with_model"), "leave out one of them"),
        (RequestOptions(secure_aggregation=True), "edge-node simulate --weights auto"),
        (RequestOptions(privacy=["epsilon=3"]), "edge-node simulate --weights auto"),
    ],
)
def test_weights_auto_chooses_where_there_is_a_choice(
    wanted: RequestOptions, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_method_with_model(monkeypatch)
    check_model_is_free(RequestOptions())
    with pytest.raises(UsageError) as refused:
        check_model_is_free(wanted)
    assert remedy in refused.value.remedy


def begin_run(state: Path, *, chooses: bool) -> Spec:
    """Begin a run in a coordinator's state folder."""
    spec, broadcast = draft(
        Request("gaussian", model="small", weights="none", size=48),
        federation="steel",
        classes=("a", "b"),
        nodes=2,
        chooses=chooses,
    )
    with Ledger(state) as ledger:
        ledger.begin_or_continue(spec, broadcast, new=False)
    return spec


def test_a_run_that_goes_on_keeps_its_size_unless_another_is_wanted(tmp_path: Path) -> None:
    spec = begin_run(tmp_path / "state", chooses=False)
    assert RequestOptions().resuming(spec).size == 48
    assert RequestOptions(size=64).resuming(spec).size == 64


def test_a_choice_that_has_begun_goes_on_only_if_it_is_wanted(tmp_path: Path) -> None:
    begin_run(tmp_path / "state", chooses=True)
    refused = here(
        "coordinate", NOWHERE, "--nodes", 2, "--classes", "a,b", "--state", tmp_path / "state"
    )
    assert refused.returncode == 2
    assert "--weights auto" in refused.stderr


def test_the_model_that_nobody_names_is_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    method = register_method_with_model(monkeypatch)
    assert RequestOptions(method=method, weights="none").request().model == "small"
    asked = RequestOptions(method=method, weights="none", model="resnet18")
    assert asked.request().model == "resnet18"
    assert RequestOptions(weights="none").request().model == MODEL


@pytest.mark.parametrize("given", [".", "model"])
def test_a_model_that_is_to_be_served_is_to_be_exported_first(given: str, tmp_path: Path) -> None:
    (tmp_path / "plant a" / "model").mkdir(parents=True)
    (tmp_path / "plant a" / "model" / "personal.json").touch()
    result = here("infer", tmp_path / "plant a" / given, "image.png")
    assert result.returncode == 2
    assert (
        f"edge-node export '{tmp_path}/plant a/model' --out bundles makes a bundle of it"
        in result.stderr
    )


BUG = "from edge_node.cli import main, line; line.parse_pairs = None; main.main()"


@pytest.mark.parametrize("debug", [(), ("--debug",)])
def test_what_nobody_expected_is_a_bug_of_ours_and_says_how_to_report_it(
    debug: tuple[str, ...],
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", BUG, *debug, "infer", "bundle", "image.png"],
        capture_output=True,
        text=True,
        check=False,
    )
    if debug:
        assert "Traceback" in result.stderr
        return
    assert result.returncode == 70
    first, second = result.stderr.splitlines()
    error = "TypeError: 'NoneType' object is not callable"
    assert re.fullmatch(
        rf"edge-node: this is a bug in edge-node: {error} \(line\.py, line \d+\)", first
    )
    assert "edge-node --debug COMMAND" in second


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(
    unbuffered: str, tmp_path: Path
) -> None:
    tiny_bundle(tmp_path / "bundle")
    (tmp_path / "red.png").write_bytes(RED)
    infer = f"{sys.executable} -m edge_node infer {tmp_path}/bundle {tmp_path}/red.png"
    command = f"PYTHONUNBUFFERED={unbuffered} {infer} | true"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.slow
def test_a_full_disk_is_named_with_the_remedy(images: Path, tmp_path: Path) -> None:
    """No file may grow beyond 64 kB here."""
    command = (
        f"ulimit -f 64; exec {sys.executable} -m edge_node simulate --data {images} --model "
        f"small --size 32 --rounds 1 --nodes 2 --samples 6 --out {tmp_path}/out"
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert f"cannot write to {tmp_path}/out/plant-1/model: " in result.stderr
    assert "free some space" in result.stderr


def test_standard_output_on_a_full_disk(tmp_path: Path) -> None:
    tiny_bundle(tmp_path / "bundle")
    (tmp_path / "red.png").write_bytes(RED)
    command = (
        f"{sys.executable} -m edge_node infer {tmp_path}/bundle {tmp_path}/red.png > /dev/full"
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


NOWHERE = "mqtt://127.0.0.1:1"


@pytest.mark.parametrize("fault", ["a file", "below a file", "full"])
@pytest.mark.parametrize(
    "command",
    [
        ("coordinate", NOWHERE, "--nodes", "2", "--classes", "a,b", "--model", "small", "--state"),
        ("join", NOWHERE, "--name", "plant-a", "--no-images", "--state"),
        ("serve", "--port", "0", "--state"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_state_folder_that_cannot_be_used_is_named_before_anything_else(
    command: tuple[str, ...], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the broker is asked, and files are read."""
    state = tmp_path / "state"
    if fault == "full":
        monkeypatch.setattr(
            os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        )
    else:
        state.touch()
        state = state if fault == "a file" else state / "inside"
    result = here(*command, state)
    words = (
        f"cannot write to {state}: No space"
        if fault == "full"
        else f"{state} cannot be a folder: Not a directory"
    )
    assert words in result.stderr
    assert result.returncode in (1, 2, os.EX_NOINPUT, os.EX_IOERR)


def test_a_process_that_may_open_too_few_files_is_refused_before_a_library_aborts_it(
    tmp_path: Path,
) -> None:
    command = [
        "prlimit",
        "--nofile=16",
        sys.executable,
        "-m",
        "edge_node",
        "serve",
        str(tmp_path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "only 16 files" in result.stderr
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/etc/secret"),
            1,
            "/etc/secret may not be used: Permission",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "cannot write: No space left on device",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            1,
            "too many files and connections are open: Too many open files",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            1,
            "memory or processes do not suffice: [Errno 12] Cannot",
        ),
        (BlockingIOError(errno.EAGAIN, "try again"), 1, "memory or processes do not suffice"),
        (MemoryError(), 1, "memory or processes do not suffice: MemoryError"),
        (
            RuntimeError("can't start new thread"),
            1,
            "memory or processes do not suffice: can't start new thread",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
            1,
            "memory or processes do not suffice",
        ),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared"),
            1,
            "memory or processes do not suffice",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "/state/lock"),
            1,
            "/state/lock is missing: No such file",
        ),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            1,
            "pip install 'edge-node[train]'",
        ),
        (
            ModuleNotFoundError("No module", name="matplotlib"),
            1,
            "pip install --editable '.[train,research]' ./weights",
        ),
        (
            ModuleNotFoundError("No module named 'x'", name="x"),
            70,
            "this is a bug in edge-node: ModuleNotFoundError",
        ),
        (OSError(errno.EBADF, "Bad file descriptor"), 70, "this is a bug in edge-node: OSError"),
        (UsageError("what", "remedy"), 2, "what\n  What to do: remedy"),
        (BrokerError("what", "remedy"), 69, "what"),
    ],
)
def test_every_error_has_its_exit_code_and_words(error: Exception, code: int, words: str) -> None:
    try:
        raise error
    except Exception as raised:
        explained = explain(raised)
    assert explained.exit_code == code
    assert words in str(explained)
    assert explained.remedy


@pytest.mark.slow
def test_a_broker_for_all_says_how_others_reach_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(
        "broker",
        "--port",
        0,
        "--host",
        "0.0.0.0",  # noqa: S104
        "--folder",
        tmp_path / "broker",
        log=log,
    )
    try:
        while "other machines reach it at mqtt://" not in log.read_text():
            assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        assert process.wait(60) == 0
    assert "mqtt://0.0.0.0" not in log.read_text().splitlines()[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_cannot_stop_by_itself_is_ended_after_a_moment(
    number: signal.Signals,
) -> None:
    """As where a thread is in the midst of fitting a classifier."""
    stubborn = (
        "import time\n"
        "from edge_node.cli.shared_options import stop_on_signals\n"
        "stop_on_signals('farewell')\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    time.sleep(0.01)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", stubborn], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert "farewell" in process.communicate(timeout=60)[1]
        assert process.returncode == 130
    finally:
        process.kill()


def test_a_coordinator_that_makes_its_first_broadcast_is_ended_by_a_signal(tmp_path: Path) -> None:
    drafting = (
        "import signal, sys\n"
        "from trainer.federation.server.choosing_runs import Federation\n"
        "def draft(*_):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('went on', flush=True)\n"
        "    sys.exit(3)\n"
        "Federation.draft = draft\n"
        "from edge_node.cli.main import main\n"
        "main()\n"
    )
    options = ["coordinate", "mqtt://127.0.0.1:1", "--nodes", "1", "--classes", "a,b"]
    ended = subprocess.run(
        [sys.executable, "-c", drafting, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (130, "")


def test_what_an_export_names_for_serving_is_a_trust_file_that_is_there(tmp_path: Path) -> None:
    for made in ("plant-a-kit/plant-a.trust", "steel/trust/plant-b.trust", "steel/kits/x"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).touch()
    own = trust_file(tmp_path / "plant-a-kit" / "plant-a.kit", "plant-a")
    provisioned = trust_file(tmp_path / "steel" / "kits" / "plant-b.kit", "plant-b")
    assert own == tmp_path / "plant-a-kit" / "plant-a.trust"
    assert provisioned == tmp_path / "steel" / "trust" / "plant-b.trust"


@pytest.mark.parametrize(
    ("typed", "proposed"),
    [
        ("edge-node simul", "simulate"),
        ("edge-node bundle acti", "activate"),
    ],
)
def test_bash_completes_what_is_typed(typed: str, proposed: str) -> None:
    words = typed.split()
    completing = {
        "_EDGE_NODE_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    program = "import sys; sys.argv[0] = 'edge-node'; from edge_node.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **completing},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [proposed]
