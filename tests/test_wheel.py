"""What is installed: the wheel, and the versions that were tested together."""

import ast
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import REPOSITORY
from trainer.models.catalogue import SHIPPED

ROOMS = ("broker_config", "edge", "edge_node", "export", "trainer")
CHECKOUT_ONLY = ("benchmarks", "deploy", "research", "tests", "weights")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
WEIGHTS = tomllib.loads((REPOSITORY / "weights" / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, with data and leftovers of kinds that may not be there yet."""
    folder = tmp_path_factory.mktemp("source")
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "NOTICE",
        "CHANGELOG.md",
        "constraints.txt",
    ):
        shutil.copy(REPOSITORY / name, folder)
    for room in ROOMS:
        shutil.copytree(
            REPOSITORY / room, folder / room, ignore=shutil.ignore_patterns("__pycache__")
        )
    for room in CHECKOUT_ONLY:
        shutil.copytree(
            REPOSITORY / room,
            folder / room,
            ignore=shutil.ignore_patterns("__pycache__", "results"),
        )
    for path in (
        "trainer/planted/a.safetensors",
        "edge/planted/deep/page.html",
        "trainer/__pycache__/old.pyc",
    ):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).touch()
    return folder


def build(source: Path, kind: str, out: Path) -> Path:
    """A `wheel`, an `editable` one or an `sdist`, as pip would have it built."""
    code = f"from hatchling import build; print(build.build_{kind}({str(out)!r}))"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=source,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    return out / result.stdout.splitlines()[-1]


def test_an_editable_install_is_a_plain_path(source: Path, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(build(source, "editable", tmp_path))
    path = next(name for name in wheel.namelist() if name.endswith(".pth"))
    assert wheel.read(path).decode().strip() == str(source)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages_and_no_leftovers(
    source: Path, tmp_path: Path
) -> None:
    files = {
        str(path.relative_to(source))
        for room in ROOMS
        for path in (source / room).rglob("*")
        if path.is_file()
    }
    wheel = zipfile.ZipFile(build(source, "wheel", tmp_path))
    names = set(wheel.namelist())
    assert not [name for name in names if name.split("/")[0] in CHECKOUT_ONLY]
    assert {name for name in names if ".dist-info/" not in name} == files - {
        "trainer/__pycache__/old.pyc"
    }
    assert {Path(name).name for name in names if ".dist-info/licenses/" in name} == {
        "LICENSE",
        "NOTICE",
    }
    weights = [name for name in names if name.endswith(".safetensors")]
    assert weights == ["trainer/planted/a.safetensors"]  # the line's install has none


@pytest.mark.slow
def test_the_wheel_of_the_weights_holds_them_and_no_code(source: Path, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(build(source / "weights", "wheel", tmp_path))
    files = {Path(name).name for name in wheel.namelist() if name.startswith("edge_node_weights/")}
    assert files == {"__init__.py", *chain.from_iterable(each.files for each in SHIPPED.values())}

    (docstring,) = ast.parse(wheel.read("edge_node_weights/__init__.py")).body
    assert isinstance(docstring, ast.Expr)

    others = [name for name in wheel.namelist() if not name.startswith("edge_node_weights/")]
    folder = f"edge_node_weights-{PROJECT['version']}.dist-info"
    assert {name for name in others if not name.startswith(folder)} == set()
    assert wheel.read(f"{folder}/licenses/LICENSE") == (source / "LICENSE").read_bytes()
    assert b"ML Illustrated" in wheel.read(f"{folder}/licenses/NOTICE")
    assert b"Requires-Dist" not in wheel.read(f"{folder}/METADATA")


def test_the_trainer_requires_the_weights_of_its_own_version_and_the_line_none() -> None:
    assert WEIGHTS["version"] == PROJECT["version"]
    asked = f"{WEIGHTS['name']}=={PROJECT['version']}"
    extras = PROJECT["optional-dependencies"]
    assert [name for name, packages in extras.items() if asked in packages] == ["train"]
    assert not [each for each in PROJECT["dependencies"] if WEIGHTS["name"] in each]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "folder"), [("wheel", "."), ("sdist", "."), ("wheel", "weights")])
def test_a_copy_elsewhere_of_another_time_and_umask_gives_the_same_bytes(
    source: Path, tmp_path: Path, kind: str, folder: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(source, elsewhere, copy_function=shutil.copyfile)  # with times of their own
    for path in elsewhere.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    built = [
        build(copy / folder, kind, tmp_path / "out" / copy.name) for copy in (source, elsewhere)
    ]
    assert built[0].name == built[1].name
    assert built[0].read_bytes() == built[1].read_bytes()


@pytest.mark.slow
def test_the_wheel_of_the_sdist_is_that_of_the_checkout(source: Path, tmp_path: Path) -> None:
    sdist = build(source, "sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        assert {name.split("/")[1] for name in archive.getnames()}.isdisjoint(CHECKOUT_ONLY)
    shutil.unpack_archive(sdist, tmp_path)
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    wheels = [
        build(folder, "wheel", tmp_path / "wheels" / folder.name) for folder in (source, unpacked)
    ]
    assert wheels[0].read_bytes() == wheels[1].read_bytes()


def test_every_dependency_has_one_tested_version_that_meets_what_it_asks() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = {
        canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines)
    }
    for text in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"]):
        asked = Requirement(text)
        if asked.name == WEIGHTS["name"]:  # comes from this checkout
            continue
        assert pins[canonicalize_name(asked.name)] in asked.specifier, asked
