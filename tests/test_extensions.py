"""A package that is installed beside edge-node adds a sink, a part of a line, a method, a check of
images and commands of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker_config.registry import Registry
from tests.support.daemon_process import serving_daemon
from tests.support.plants import draw
from tests.support.tiny_bundle import tiny_bundle

MODULE = """
from contextlib import contextmanager
from pathlib import Path

import typer
from msgspec import Struct
from trainer.data.checks.findings import Finding
from trainer.methods.base import Entry, OneStage
from trainer.methods.fedavg import fedavg

ENTRY = Entry(OneStage, fedavg)
app = typer.Typer()
bundle = typer.Typer(name="bundle")


@bundle.command()
def weigh() -> None:
    '''Weigh a bundle.'''
    print("two pounds")


@app.command()
def greet() -> None:
    '''Greet the plant.'''
    print("good morning")


def check_names(images):
    longest = max(images.facts, key=lambda each: len(each.path.name))
    files = (str(longest.path),)
    yield Finding("hint", "long name", f"{longest.path} is long", "shorten it", files)
    yield Finding("error", "no light", f"it was dark at {images.size} pixels", "wait for the day")


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
               tag="tally"):
    path: str

    def open_sink(self, instance, origin):
        return Tally(self.path)


class Doorbell(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str

    @contextmanager
    def open_part(self, line):
        Path(self.path).write_text(f"{line.instance.line} {line.rollout.store.state().active}")
        yield
        Path(self.path).write_text("closed")


class Tally:
    def __init__(self, path):
        self.name = f"tally:{path}"
        self._path = Path(path)

    def deliver(self, items):
        with self._path.open("a") as file:
            file.writelines(f"{item.seq}\\n" for item in items)

    def close(self):
        pass
"""

REGISTERED = """
[edge_node.sinks]
tally = plant_extras:Settings
[edge_node.methods]
plant_average = plant_extras:ENTRY
[edge_node.image_checks]
a_name = plant_extras:check_names
[edge_node.commands]
plant_extras = plant_extras:app
a_bundle = plant_extras:bundle
[edge_node.line_parts]
doorbell = plant_extras:Doorbell
"""


@pytest.fixture
def extras(tmp_path: Path) -> Path:
    """A folder with the package, as `pip install --target` leaves it."""
    return install(tmp_path / "installed", REGISTERED)


def install(folder: Path, registered: str) -> Path:
    metadata = folder / "plant_extras-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "plant_extras.py").write_text(MODULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: plant-extras\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(registered)
    return folder


def edge_node(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "edge_node", *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_its_command_is_in_the_help_and_runs(extras: Path) -> None:
    assert "greet" in edge_node(extras, "--help").stdout
    assert edge_node(extras, "greet").stdout == "good morning\n"


def test_its_command_stands_in_a_group_of_ours_that_has_the_name_of_its_app(extras: Path) -> None:
    shown = edge_node(extras, "bundle", "--help").stdout
    assert "activate" in shown
    assert "weigh" in shown
    assert edge_node(extras, "bundle", "weigh").stdout == "two pounds\n"


def test_its_method_is_in_the_help_and_trains(extras: Path, tmp_path: Path) -> None:
    assert "plant_average" in edge_node(extras, "simulate", "--help").stdout
    images = draw(tmp_path / "images", 12, 1, size=32)
    out = tmp_path / "out"
    words = [
        "--method",
        "plant_average",
        "--model",
        "small",
        "--size",
        "32",
        "--rounds",
        "1",
        "--nodes",
        "2",
        "--samples",
        "4",
    ]
    done = edge_node(extras, "simulate", "--data", images, "--out", out, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "report.json").read_text())["method"] == "plant_average"


def test_what_its_check_finds_comes_after_ours_and_keeps_a_plant_from_joining(
    extras: Path, tmp_path: Path
) -> None:
    images = draw(tmp_path / "images", 12, 1, size=32)
    darkest = min(images.glob("*/*.png"))
    darkest.rename(darkest.with_name("a-long-name-of-an-image.png"))
    small = draw(tmp_path / "other", 1, 2, size=33) / "patches" / "2-0.png"
    small.rename(images / "patches" / "other.png")
    done = edge_node(extras, "check", images, "--size", 32, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    found = [(each["severity"], each["kind"]) for each in told["findings"]]
    assert found == [("error", "no light"), ("hint", "sizes"), ("hint", "long name")]
    assert told["findings"][-1]["files"] == [str(darkest.with_name("a-long-name-of-an-image.png"))]


def test_its_sink_is_a_table_of_a_lines_settings(extras: Path, tmp_path: Path) -> None:
    settings = tmp_path / "line.toml"
    settings.write_text('[[sinks]]\nkind = "tally"\npath = "numbers"\n')
    code = (
        "import sys; from pathlib import Path; from edge.config.options_file import load;"
        "from edge.config.instance import Instance; from edge.daemon.line_settings import parse;"
        "file = Path(sys.argv[1]); (each,) = parse(load(file), file).sinks;"
        "print(each.open_sink(Instance('line-1', file.parent), None).name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, settings],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(extras), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"tally:{tmp_path / 'numbers'}"


def test_its_part_of_a_line_has_a_table_and_works_while_the_line_serves(
    extras: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(extras), *sys.path]))
    bundle = tiny_bundle(tmp_path / "bundle")
    (tmp_path / "line.toml").write_text('[doorbell]\npath = "rung"\n')
    with serving_daemon(
        tmp_path / "state", tmp_path / "bundle", "--config", tmp_path / "line.toml"
    ) as line:
        assert (tmp_path / "rung").read_text() == f"line-1 {bundle.digest[:12]}"
        assert line.end()[0] == 0
    assert (tmp_path / "rung").read_text() == "closed"


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("[doorbell]\npath = 7\n", "$.doorbell.path"),
        ("[chime]\npath = 'rung'\n", "[chime]"),
    ],
)
def test_a_table_that_does_not_fit_its_part_or_is_nobodys_is_named(
    extras: Path, tmp_path: Path, table: str, named: str
) -> None:
    (tmp_path / "line.toml").write_text(table)
    done = edge_node(extras, "serve", "--config", tmp_path / "line.toml")
    assert done.returncode == 78
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_a_kind_of_which_the_kernel_has_none_may_be_empty() -> None:
    kind = "kinds_of_nobody"
    assert [*Registry(kind, needed=False)] == []


def test_a_package_that_cannot_be_imported_is_named_and_takes_no_command_away(
    tmp_path: Path,
) -> None:
    broken = install(tmp_path, "[edge_node.commands]\nplant_extras = plant_extras:nothing\n")
    done = edge_node(broken, "--help")
    assert done.returncode == 0
    assert "coordinate" in done.stdout
    assert "plant-extras" in done.stderr


def test_two_packages_of_one_name_are_named_both(tmp_path: Path) -> None:
    double = install(tmp_path, "[edge_node.methods]\nfedavg = plant_extras:ENTRY\n")
    done = edge_node(double, "simulate", "--help")
    assert done.returncode != 0
    assert "plant_extras:ENTRY" in done.stderr
    assert "trainer.methods.fedavg:ENTRY" in done.stderr
