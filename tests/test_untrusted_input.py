"""Nothing that comes from elsewhere is ever unpickled or run: read from the source,
and tried with files that bite.
"""

import ast
import hashlib
import inspect
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError

from broker_config.protocol import topics
from broker_config.protocol.codec import DecodeError, decode_any, encode, read_tensors
from broker_config.protocol.errors import EdgeNodeError, UsageError
from broker_config.protocol.messages import TensorSpec
from broker_config.security import kit
from edge.bundle import bundle_format
from edge.bundle.bundle_format import BundleError
from edge.daemon.daemon import serve
from edge.doctor.probe import Result
from edge.doctor.run import _row
from edge.inference.image_decoding import ImageError
from edge.inference.predictor import Predictor
from edge.status.federations import StatusMonitor
from edge.status.rendering import render
from edge_node.cli.main import app, command_tree, main
from tests.support.paths import REPOSITORY
from tests.support.personal_models import FACTS
from tests.support.tiny_bundle import tiny_bundle
from tests.support.wire_messages import SPEC
from trainer import progress
from trainer.federation import run_summary
from trainer.models.initial_weights import initial_encoder
from trainer.training import personal_model
from trainer.training.participant import State

ROOMS = ("broker_config", "edge", "edge_node", "export", "trainer", "research", "benchmarks")

# What runs code that stands in data, or hands data to what does.
FORBIDDEN_MODULES = (
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
    "yaml",
    "multiprocessing",
    "ray",
)
FORBIDDEN_NAMES = (
    "torch.load", "torch.jit.load", "torch.hub.load", "numpy.load", "pandas.read_pickle",
    "logging.config.listen", "concurrent.futures.ProcessPoolExecutor", "eval", "exec", "compile",
    "__import__", "builtins.eval", "builtins.exec", "builtins.compile", "os.system", "os.popen",
    "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
)  # fmt: skip

# An experiment's jobs travel pickled between the processes, or the Ray machines, of the one user
# who starts it; none of it is on the way of a federation or a line. The package's own weights are
# trained with checkpoints that hold tensors.
ALLOWED = {
    "research/runner/processes.py": {
        "pickle",
        "concurrent.futures.ProcessPoolExecutor",
        "multiprocessing",
    },
    "research/runner/cluster.py": {"ray"},
    "benchmarks/synthetic_nodes.py": {"concurrent.futures.ProcessPoolExecutor", "multiprocessing"},
    "benchmarks/light_fleet.py": {"concurrent.futures.ProcessPoolExecutor", "multiprocessing"},
    "benchmarks/robust.py": {"concurrent.futures.ProcessPoolExecutor", "multiprocessing"},
    "benchmarks/statistics_sums.py": {"concurrent.futures.ProcessPoolExecutor", "multiprocessing"},
    "benchmarks/vfl_rounds.py": {"multiprocessing"},
    "benchmarks/federation_rounds.py": {"multiprocessing"},
    "benchmarks/encrypted_rounds.py": {"multiprocessing"},
    "benchmarks/secure_rounds.py": {"multiprocessing"},
    "research/pretraining/pretrain.py": {"torch.load"},
    # once, of published weights: tensors only
    "research/pretraining/convert_lite0.py": {"torch.load"},
    "research/dao_vfl/data.py": {"numpy.load"},  # without pickled objects
    "research/studies/consensus_head.py": {"numpy.load"},  # likewise
    "research/studies/frozen_heads.py": {"numpy.load"},  # likewise
}


def dangers(source: str) -> set[str]:
    """Every forbidden module or name that a module imports or uses, whatever it calls it,
    and `shell=True`.
    """
    tensors = ast.parse(source)
    names = dict(_imported(tensors))
    used = {
        _dotted(node, names)
        for node in ast.walk(tensors)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    found = {name for name in FORBIDDEN_NAMES if name in used | set(names.values())}
    found |= {
        name
        for name in FORBIDDEN_MODULES
        if any(f"{each}.".startswith(f"{name}.") for each in names.values())
    }
    keywords = [
        keyword
        for node in ast.walk(tensors)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    ]
    if any(each.arg == "shell" and ast.unparse(each.value) != "False" for each in keywords):
        found.add("shell=True")
    return found


def _imported(tensors: ast.AST) -> Iterator[tuple[str, str]]:
    """What a module's own names stand for."""
    for node in ast.walk(tensors):
        if isinstance(node, ast.Import):
            yield from (
                (each.asname or each.name.split(".")[0], each.name)
                for each in node.names
                if each.asname
            )
            yield from ((each.name, each.name) for each in node.names if not each.asname)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                (each.asname or each.name, f"{node.module}.{each.name}") for each in node.names
            )


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`np.load` as `numpy.load`; what hangs on anything but a name begins with a dot."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def test_nothing_unpickles_evaluates_or_starts_a_shell():
    sources = {
        path: path.read_text() for room in ROOMS for path in (REPOSITORY / room).rglob("*.py")
    }
    assert len(sources) > 120
    found = {
        str(path.relative_to(REPOSITORY)): each
        for path, source in sources.items()
        if (each := dangers(source))
    }
    assert found == ALLOWED


def test_checkpoints_of_our_own_training_hold_tensors_only():
    calls = [
        node
        for node in ast.walk(
            ast.parse((REPOSITORY / "research/pretraining/pretrain.py").read_text())
        )
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert [
        {each.arg: ast.literal_eval(each.value) for each in call.keywords} for call in calls
    ] == [{"weights_only": True}]


@pytest.mark.parametrize(
    ("source", "danger"),
    [
        ("import pickle\npickle.loads(b'')", "pickle"),
        ("import _pickle as quick", "_pickle"),
        ("def f():\n    from cloudpickle import loads", "cloudpickle"),
        ("import dill", "dill"),
        ("import joblib\njoblib.load(path)", "joblib"),
        ("import marshal", "marshal"),
        ("import shelve", "shelve"),
        ("from yaml import safe_load", "yaml"),
        ("import multiprocessing.connection", "multiprocessing"),
        ("from ray import get", "ray"),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("import torch\ntorch.load(path, weights_only=True)", "torch.load"),
        ("from torch import load as read", "torch.load"),
        ("import torch as t\nread = t.load", "torch.load"),
        ("import torch\ntorch.jit.load(path)", "torch.jit.load"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "numpy.load"),
        ("import numpy\nnumpy.load(path)", "numpy.load"),
        ("eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("run = compile", "compile"),
        ("import os\nos.system(text)", "os.system"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell=True"),
        ("subprocess.Popen(text, shell=wanted)", "shell=True"),
        (
            "from concurrent.futures import ProcessPoolExecutor",
            "concurrent.futures.ProcessPoolExecutor",
        ),
    ],
)
def test_each_danger_is_found_whatever_it_is_called(source: str, danger: str):
    assert dangers(source) == {danger}


def test_what_only_looks_like_one_is_not():
    assert (
        dangers(
            "import re\nre.compile(x)\nmodel.eval()\nself.load()\nsubprocess.run(x, shell=False)"
        )
        == set()
    )


def test_the_line_listens_on_this_machine_only_unless_told_otherwise():
    assert inspect.signature(serve).parameters["host"].default == "127.0.0.1"
    (host,) = [each for each in command_tree(app).commands["serve"].params if each.name == "host"]
    assert host.default == "127.0.0.1"


# Files that bite


class Bomb:
    """Unpickled, it makes a folder: the proof that code in the file was run."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def pickled(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def numpy_file(content: object, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([content], dtype=object), allow_pickle=True)


# How one is made, and the careless reader that it is made for. torch's checkpoints are zip files
# with a pickle inside.
BOMBS: dict[str, tuple[Callable[[object, Path], object], Callable[[Path], object]]] = {
    "pickle": (pickled, lambda path: pickle.loads(path.read_bytes())),  # noqa: S301
    "checkpoint": (torch.save, lambda path: torch.load(path, weights_only=False)),
    "numpy": (numpy_file, lambda path: np.load(path, allow_pickle=True)),
}


@pytest.fixture(params=BOMBS)
def bomb(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[bytes]:
    """Each in turn. Afterwards: it has not gone off, and would have."""
    marker, path = tmp_path / "bitten", tmp_path / "bomb"
    make, read = BOMBS[request.param]
    make(Bomb(marker), path)
    yield path.read_bytes()
    assert not marker.exists(), "what stood in the file was run"
    read(path)
    assert marker.exists()


def test_a_message_or_a_blob_from_the_network_that_is_a_pickle_is_refused(
    bomb: bytes, tmp_path: Path
):
    with pytest.raises(DecodeError):
        decode_any(bomb)
    (tmp_path / "blob").write_bytes(bomb)
    roomy = {"encoder.weight": TensorSpec(shape=(len(bomb),), scale=0)}
    with pytest.raises(DecodeError, match="safetensors"):
        list(read_tensors(tmp_path / "blob", roomy))


def test_initial_weights_that_are_a_pickle_are_refused(bomb: bytes, tmp_path: Path):
    (tmp_path / "weights.pt").write_bytes(bomb)
    with pytest.raises(UsageError, match="safetensors"):
        initial_encoder("small", str(tmp_path / "weights.pt"), 0)


def test_a_kit_that_is_a_pickle_is_refused(bomb: bytes, tmp_path: Path):
    (tmp_path / "plant-a.kit").write_bytes(bomb)
    with pytest.raises(UsageError, match="no kit"):
        kit.read(tmp_path / "plant-a.kit", "any")


def test_a_nodes_state_that_is_a_pickle_is_refused(bomb: bytes, tmp_path: Path):
    (tmp_path / "state.safetensors").write_bytes(bomb)
    with pytest.raises(SafetensorError):
        State.load(tmp_path / "state.safetensors")


def test_a_personal_model_that_is_a_pickle_is_refused(bomb: bytes, tmp_path: Path):
    metadata = msgspec.json.encode(FACTS)
    for name, content in (("personal.json", metadata), ("personal.safetensors", bomb)):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match="is damaged"):
        personal_model.load(tmp_path)
    (tmp_path / "personal.json").write_bytes(bomb)
    with pytest.raises(UsageError, match="is damaged"):
        personal_model.load(tmp_path)


@pytest.mark.parametrize("file", ["manifest.json", "model.onnx", "golden.png"])
def test_a_bundle_with_a_pickle_is_refused_even_if_its_hashes_fit(
    bomb: bytes, file: str, tmp_path: Path
):
    folder = tmp_path / "bundle"
    old = hashlib.sha256((tiny_bundle(folder).folder / file).read_bytes()).hexdigest()
    (folder / file).write_bytes(bomb)
    manifest = folder / "manifest.json"
    if file != "manifest.json":
        manifest.write_text(manifest.read_text().replace(old, hashlib.sha256(bomb).hexdigest()))
    with pytest.raises((BundleError, ImageError)):
        Predictor(bundle_format.read_bundle(folder)).self_test()


# What others wrote, in a terminal

ESCAPE = "\x1b]0;owned\x07\x9b2J"


def test_what_others_wrote_is_no_markup() -> None:
    """rich would make a style of a name in brackets, and a picture of one between colons."""
    name = "[red]plant[/red][/]:smile:"
    said = io.StringIO()
    terminal = Console(file=said, force_terminal=True, color_system=None, width=100)
    with progress.board.live(terminal) as live:
        live(progress.Note(text=f"note {name}"))
        live(progress.NodeJoined(node=name))
        live(progress.Measured(node=name, round=1, metrics={name: 1.0}))
    monitor = StatusMonitor()
    monitor.update(
        topics.spec(SPEC.federation),
        encode(msgspec.structs.replace(SPEC, model=name)),
        retained=True,
    )
    terminal.print(render(monitor, terminal))
    figures = {"accuracy": 1, "accuracy_low": 0, "accuracy_high": 1, "accuracy_all": 1, "f1": 1}
    row = run_summary.NodeReport(name=name, classes=[name], images=1, test_images=1, **figures)
    report = run_summary.RunReport(
        method=name, options={}, model="m", size=32, training={}, rounds=1, seed=0, nodes=[row]
    )
    run_summary.print_table(report, Console(file=said, width=200))
    text = said.getvalue()
    assert "\U0001f604" not in text
    for shown in (
        f"note {name}",
        f"{name} joined",
        f"afedcl, {name}",
        f"{name}, m, 1 round",
        f"│ {name} │",
    ):
        assert shown in text


def test_what_others_wrote_moves_no_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node's metrics, a coordinator's reasons and method, a broker's name:
    nothing of it is for the terminal.
    """
    said = io.StringIO()
    log = progress.log_lines(said)
    board = Console(file=said, force_terminal=True, color_system=None)
    told = progress.Note(text=ESCAPE), progress.Measured(node="a", round=1, metrics={ESCAPE: 1.0})
    with progress.board.live(board) as live:
        for event in (*told, progress.RoundClosed(round=1, contributors=[], seconds=1.0)):
            log(event)
            live(event)
    board.print(_row(Result("ok", f"MQTT 5, {ESCAPE}", ESCAPE, name="version")))
    monitor = StatusMonitor()
    spec = msgspec.structs.replace(SPEC, method=ESCAPE, model=ESCAPE)
    monitor.update(topics.spec(spec.federation), encode(spec), retained=True)
    board.print(render(monitor, board))

    def fail() -> None:
        raise EdgeNodeError(f"it ended: {ESCAPE}\n  first\n  second", ESCAPE)

    monkeypatch.setattr("edge_node.cli.main.command_tree", lambda _: fail)
    with pytest.raises(SystemExit):
        main()
    text = said.getvalue() + (errors := capsys.readouterr().err)
    assert "]0;owned" in text
    assert (
        "owned\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}2J\n  first\n  second\n" in errors
    )
    assert not re.search("\x1b\\]|\x07|\x9b", text)
