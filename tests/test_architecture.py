"""The architecture, read from the source: which room imports which, circles,
names of files, retired words.
"""

import ast
import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import REPOSITORY

ROOMS = ("broker_config", "edge", "edge_node", "export", "trainer")  # what the wheel holds
OUTSIDE = ("research", "benchmarks", "tests")
# and what loads it
TORCH = ("torch", "torchvision", "safetensors.torch", "torchmetrics", "stable_baselines3")
PRODUCT = ("edge_node",)  # the uppermost room
EXTENSIONS = "edge_node.extensions"
FORWARDS = ("edge.cli",)  # what units of version 0.1 call, to the uppermost room

ENTRY_POINTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]


class Import(NamedTuple):
    """A module that is imported, and whether that happens as soon as the importing module is."""

    name: str
    at_once: bool


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import in a module of `package`: `from a import b` counts as `a` and `a.b`,
    relative names are resolved.
    """
    yield from _imports(ast.parse(source), package, at_once=True)


def _imports(node: ast.AST, package: str, *, at_once: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, at_once) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            parents = (
                package.split(".")[: len(package.split(".")) - child.level + 1]
                if child.level
                else []
            )
            origin = ".".join([*parents, *([child.module] if child.module else [])])
            yield Import(origin, at_once)
            yield from (Import(f"{origin}.{alias.name}", at_once) for alias in child.names)
        else:
            later = isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            ) or _for_types_only(child)
            yield from _imports(child, package, at_once=at_once and not later)


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def dotted(path: Path) -> str:
    """The name under which a file of the repository is imported."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def python_files() -> dict[str, Path]:
    """Every module of the repository by its dotted name."""
    return {
        dotted(path): path
        for folder in (*ROOMS, *OUTSIDE)
        for path in (REPOSITORY / folder).rglob("*.py")
    }


@functools.cache
def imported(name: str) -> list[Import]:
    """What a module of the repository imports."""
    path = python_files()[name]
    return list(
        imports(path.read_text(), name if path.name == "__init__.py" else name.rpartition(".")[0])
    )


@functools.cache
def modules() -> dict[str, list[Import]]:
    """Every product module by its dotted name, with what it imports."""
    return {name: imported(name) for name in python_files() if within(name, ROOMS)}


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def room(*packages: str, but: tuple[str, ...] = ()) -> list[str]:
    """The modules of some packages; there must be more than the package itself,
    or nothing would be tested.
    """
    found = [name for name in modules() if within(name, packages) and not within(name, but)]
    assert set(found) - set(packages), f"no module in {packages}"
    return found


def breaches(
    names: list[str], forbidden: tuple[str, ...], *, only_at_once: bool = False
) -> list[str]:
    """`module imports forbidden`, for each such import."""
    return [
        f"{name} imports {found.name}"
        for name in names
        for found in modules()[name]
        if within(found.name, forbidden) and (found.at_once or not only_at_once)
    ]


def loaded(name: str) -> set[str]:
    """All that importing a module imports at once, through other modules of ours too."""
    done: set[str] = set()
    todo = {name}
    while todo:
        module = todo.pop()
        done.add(module)
        parts = module.split(".")
        parents = {".".join(parts[:count]) for count in range(1, len(parts))}
        todo |= (
            parents | {found.name for found in modules().get(module, []) if found.at_once}
        ) - done
    return done


def test_the_line_imports_neither_training_nor_export_nor_torch():
    assert breaches(room("edge"), ("trainer", "export", *TORCH)) == []


def test_the_command_line_imports_training_and_export_only_inside_functions():
    commands = room("edge_node.cli")
    commands += [name for name in room(EXTENSIONS) if name.endswith(".commands")]
    assert breaches(commands, ("trainer", "export", *TORCH), only_at_once=True) == []


def test_the_contract_imports_no_other_room_and_no_torch():
    assert breaches(room("broker_config"), ("edge", "edge_node", "export", "trainer", *TORCH)) == []


def test_training_does_not_import_export():
    assert breaches(room("trainer"), ("export",)) == []


def test_no_lower_room_imports_the_product():
    lower = [name for name in modules() if not within(name, (*PRODUCT, *FORWARDS))]
    assert breaches(lower, PRODUCT) == []


def extensions() -> dict[str, set[str]]:
    """The extensions, each with the names under which it registers things."""
    found = {
        path.name: {path.name, path.name.replace("_", ""), path.name.replace("_", "-")}
        for path in (REPOSITORY / "edge_node" / "extensions").iterdir()
        if (path / "__init__.py").exists()
    }
    for group in ENTRY_POINTS.values():
        for name, where in group.items():
            if where.startswith(f"{EXTENSIONS}."):
                found[where.split(".")[2]].add(name)
    return found


def test_extensions_do_not_import_each_other():
    found = []
    for each in extensions():
        others = tuple(f"{EXTENSIONS}.{other}" for other in extensions() if other != each)
        found += breaches(room(f"{EXTENSIONS}.{each}"), others)
    assert found == []


# Words that everybody uses, whatever extensions are called.
ORDINARY = {"arrival", "record", "textures", "tracking"}
SOURCES = (".py", ".toml", ".html", ".js", ".css", ".json", ".conf")


def test_no_file_of_the_kernel_names_an_extension():
    names = set().union(*extensions().values()) - ORDINARY
    assert {"vfl", "fedtfi", "audit", "opcua"} <= names
    words = "|".join(map(re.escape, sorted(names)))
    name = re.compile(rf"(?<![a-z])({words})(?![a-z])", re.IGNORECASE)
    kernel = [REPOSITORY / each for each in (*ROOMS, "edge_node/cli") if each not in PRODUCT]
    named = []
    for path in chain.from_iterable(folder.rglob("*") for folder in kernel):
        if path.suffix in SOURCES and ".min." not in path.name:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if found := name.search(line):
                    named.append(f"{path.relative_to(REPOSITORY)}:{number} {found[0]}")
    assert named == []


def test_nothing_in_the_wheel_imports_research_benchmarks_or_tests():
    assert breaches(list(modules()), OUTSIDE) == []


def test_methods_know_nothing_of_mqtt_or_the_coordinator():
    assert breaches(room("trainer.methods"), ("paho", "trainer.federation")) == []


def test_methods_import_torch_only_inside_functions():
    assert breaches(room("trainer.methods"), TORCH, only_at_once=True) == []


def test_the_server_imports_no_torch_not_even_inside_functions():
    assert breaches(room("trainer.federation.server"), TORCH) == []


@pytest.mark.parametrize(
    "package",
    [
        "edge",
        "edge_node.cli",
        "broker_config",
        "trainer.federation.server",
        "trainer.data.checks",
        "trainer.methods",
        f"{EXTENSIONS}.bundle_delivery",
        f"{EXTENSIONS}.genicam",
        f"{EXTENSIONS}.home_assistant",
        f"{EXTENSIONS}.opcua",
        f"{EXTENSIONS}.record",
        f"{EXTENSIONS}.sparkplug",
        f"{EXTENSIONS}.vfl.line",
    ],
)
def test_torch_is_not_loaded_through_another_module_either(package):
    assert [name for name in room(package) if loaded(name) & set(TORCH)] == []


def test_nothing_that_is_registered_loads_torch_when_it_is_looked_up():
    found = set().union(*(registered(group.partition(".")[2]) for group in ENTRY_POINTS))
    assert [name for name in sorted(found) if loaded(name) & set(TORCH)] == []


def direct(name: str, found: list[Import]) -> set[str]:
    """Our modules that a module imports: `from package import name` the package,
    unless the name is a module.
    """
    names = {each.name for each in found}
    names -= {each for each in names if any(other.startswith(f"{each}.") for other in names)}
    ours = {each if each in modules() else each.rpartition(".")[0] for each in names}
    return (ours & set(modules())) - {name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or not."""
    reach = {}
    for name, direct in graph.items():
        found: set[str] = set()
        todo = set(direct)
        while todo:
            found.add(module := todo.pop())
            todo |= graph[module] - found
        reach[name] = found
    return sorted(
        {tuple(sorted(m for m in reach[n] if n in reach[m])) for n in graph if n in reach[n]}
    )


def test_no_files_import_each_other_in_a_circle_not_even_for_types():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [("a", "b", "c")]
    assert circles({name: direct(name, found) for name, found in modules().items()}) == []


def folders(room: str) -> dict[str, set[str]]:
    """The folders of a room with those that each imports from."""
    inside = {name: name.split(".")[1] for name in modules() if name.startswith(f"{room}.")}
    names = {path.name for path in (REPOSITORY / room).iterdir() if (path / "__init__.py").exists()}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, folder in inside.items():
        if folder in names:
            graph[folder] |= {inside.get(each, folder) for each in direct(name, modules()[name])}
    return {name: (others & names) - {name} for name, others in graph.items()}


@pytest.mark.parametrize("room", ["broker_config", "edge", "trainer"])
def test_no_folders_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    graph = folders(room)
    assert len(graph) > 4
    assert circles(graph) == []


def test_a_package_is_imported_where_one_of_its_own_names_is():
    def names(source: str) -> set[str]:
        return direct("trainer.methods.base", list(imports(source, "trainer.methods")))

    assert names("from trainer.methods import afedcl") == {"trainer.methods.afedcl"}
    assert names("from trainer.methods import METHODS") == {"trainer.methods"}
    assert names("from . import METHODS, afedcl") == {"trainer.methods", "trainer.methods.afedcl"}


# Tests

MIRROR = tomllib.loads((REPOSITORY / "tests" / "mirror.toml").read_text())
UNTESTED = set(MIRROR.pop("untested"))
STAND_INS = {
    f"{room}.{name}": test
    for room in MIRROR
    for test, names in MIRROR[room].items()
    for name in names
}


def registered(kind: str) -> set[str]:
    """Modules whose things this project registers."""
    return {where.partition(":")[0] for where in ENTRY_POINTS[f"edge_node.{kind}"].values()}


@functools.cache
def mentioned(name: str) -> set[str]:
    """Modules of ours that a module imports, has registered in a registry that it reads,
    or names in a string, as those do that start processes.
    """
    found = {each.name for each in imported(name)}
    for node in ast.walk(ast.parse(python_files()[name].read_text())):
        match node:
            case ast.Constant(value=str(text)):
                found |= set(re.findall(r"\w+(?:\.\w+)+", text))
            case ast.Call(func=ast.Name(id="Registry"), args=[ast.Constant(value=kind)]):
                found |= registered(kind)
    return {each if each in python_files() else each.rpartition(".")[0] for each in found} & set(
        python_files()
    )


def exercised(test: str) -> set[str]:
    """Modules to which a test comes directly or through one other; support,
    packages and commands do not count.
    """
    done: set[str] = set()
    nearest = {test}
    for _ in range(2):
        todo, nearest = list(nearest - done), set()
        while todo:
            done.add(name := todo.pop())
            for each in mentioned(name) - done:
                free = (
                    within(each, ("tests", *PRODUCT, *FORWARDS))
                    or python_files()[each].name == "__init__.py"
                )
                todo.append(each) if free else nearest.add(each)
    return done | nearest


def test_every_module_has_a_test_at_the_same_path_or_one_that_stands_for_it() -> None:
    tested = {
        name.removeprefix("tests.").replace(".test_", ".")
        for name in python_files()
        if within(name, ("tests",))
    }
    owed = {
        name
        for name, path in python_files().items()
        if within(name, (*ROOMS, "research")) and path.name not in ("__init__.py", "__main__.py")
    }
    assert owed - tested - UNTESTED == set(STAND_INS)


@pytest.mark.parametrize("test", sorted(set(STAND_INS.values())))
def test_a_test_that_stands_for_modules_comes_to_them(test: str) -> None:
    here = dotted(REPOSITORY / "tests" / test)
    assert {name for name, its in STAND_INS.items() if its == test} - exercised(here) == set()


def test_no_test_module_imports_another() -> None:
    """What they share is in tests/support/."""
    found = [
        f"{name} imports {each.name}"
        for name in python_files()
        if within(name, ("tests",))
        for each in imported(name)
        if re.fullmatch(r"tests\.(\w+\.)*(test_\w+|conftest)", each.name)
    ]
    assert found == []


def patched(source: str) -> set[str]:
    """Private names of others that a test replaces."""
    name = r"_(?!_)\w+"
    by_name = rf"""setattr\([^()"']*["'](?:\w+\.)*({name})["']"""
    within_it = rf"setattr\((?:\w+\.)+({name})"
    by_assignment = rf"^\s*(?!self\.\w+ = )[\w.]+\.({name}) = "
    found = re.findall(f"{by_name}|{within_it}|{by_assignment}", source, re.MULTILINE)
    return {each for groups in found for each in groups if each}


# Each says where it is patched why no parameter would do.
PATCHED = {
    "_COST",
    "_DRAIN",
    "_LAST_RESORT",
    "_STEPS",
    "_client_id",
    "_commit",
    "_send_at_once",
    "_write",
}


def test_private_names_are_not_patched_where_a_parameter_would_do() -> None:
    assert patched("""
        patch.setattr(module, "_A", 1); patch.setattr("package.module._B", 1); \
patch.setattr(module._C, "ask", f)
        module._d = 1
        patch.setattr(module, "PUBLIC", 1); patch.setattr(package, "__path__", [])
        self._own = thread
    """) == {"_A", "_B", "_C", "_d"}
    here = Path(__file__)
    sources = [path.read_text() for path in (REPOSITORY / "tests").rglob("*.py") if path != here]
    assert set().union(*map(patched, sources)) == PATCHED


def unexplained_sleeps(path: Path) -> list[int]:
    """The lines on which a test sleeps without a reason beside it;
    `sleep(0)` only lets others run.
    """
    source = path.read_text()
    calls = (
        [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        if ".sleep(" in source
        else []
    )
    sleeps = [
        call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "sleep"
    ]
    lines = source.splitlines()
    return [
        call.lineno
        for call in sleeps
        if ast.unparse(call.args[0]) != "0" and "  # " not in lines[call.lineno - 1]
    ]


def test_no_process_of_ours_imports_from_the_folder_in_which_it_is_started() -> None:
    """`python -m` does, and it may be a folder of images in which others write."""
    started = re.compile(r"sys\.executable,\s*(\S+)")
    found = {}
    for room in ROOMS:
        for path in (REPOSITORY / room).rglob("*.py"):
            if flags := set(started.findall(path.read_text())):
                found[path.name] = flags
    assert len(found) > 4
    assert set.union(*found.values()) == {'"-P",'}, found


def test_who_sleeps_says_why_and_who_waits_does_so_in_one_place() -> None:
    """A condition is waited for with `wait_until`;
    what a clock does is tested with a clock that a test moves.
    """
    files = [path for path in (REPOSITORY / "tests").rglob("*.py") if path.name != "waiting.py"]
    assert [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path in files
        for line in unexplained_sleeps(path)
    ] == []


# Names

# Files of one name play the same role, each in its room.
ROLES = {
    "__init__", "announcements", "checkpoint", "commands", "connection", "coordinator",
    "discovery", "events", "folder", "join", "journal", "messages", "mqtt", "options",
    "round_state", "session", "session_state", "simulation", "sink", "source", "spec",
    "status", "topics",
}  # fmt: skip


def test_two_files_have_one_name_only_for_the_same_role():
    counts = Counter(
        path.stem
        for name, path in python_files().items()
        if within(name, ROOMS) and not within(name, FORWARDS)
    )
    assert {name for name, count in counts.items() if count > 1} - ROLES == set()


# No noun phrase begins with one of these.
NO_NOUN = {
    "What",
    "Whether",
    "Who",
    "How",
    "When",
    "Where",
    "Which",
    "Why",
    "From",
    "Running",
    "Looking",
    "Saying",
}


def test_a_module_begins_with_a_noun_phrase_that_says_what_lives_there():
    heads = {
        path: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        for room in (*ROOMS, *OUTSIDE[:2])
        for path in (REPOSITORY / room).rglob("*.py")
    }
    assert [
        str(path) for path, head in heads.items() if not head or head.split()[0] in NO_NOUN
    ] == []


# Private metaphors that once named parts of the product; each has a plain term now.
RETIRED = {
    "arrivals", "bell", "courier", "crier", "desk", "herald", "keeper", "lean", "reception",
    "roster", "spool", "standing", "turns",
}  # fmt: skip


def words(name: str) -> set[str]:
    """The words of an identifier: `HeraldOfNews` and `herald_of_news` have the same."""
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_"))


def test_no_module_class_or_function_bears_a_retired_metaphor():
    found = []
    for room in ROOMS:
        for path in (REPOSITORY / room).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            names = {
                path.stem,
                path.parent.name,
                *(node.name for node in nodes if isinstance(node, kinds)),
            }
            found += [
                f"{path.relative_to(REPOSITORY)}: {name}" for name in names if words(name) & RETIRED
            ]
    assert found == []


def test_the_page_on_the_architecture_names_every_room_and_nothing_else():
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = set(
        re.findall(
            r"`((?:broker_config|edge|edge_node|export|trainer|research|benchmarks|tests)/[\w/.]*)`",
            page,
        )
    )
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
    rooms = {
        f"{path.relative_to(REPOSITORY)}/"
        for room in ROOMS
        for path in [REPOSITORY / room, *(REPOSITORY / room).glob("*")]
        if list(path.glob("*.py"))
    }
    missing = {room for room in rooms if not any(name.startswith(room) for name in named)}
    assert missing == set()
    assert len(page.splitlines()) <= 150


def test_imports_are_found_wherever_they_stand():
    source = """
import torch.nn as nn
from .. import engine
from .base import Method
if TYPE_CHECKING:
    import paho
class A:
    import early
    def f(self):
        from export import model
"""
    assert set(imports(source, "trainer.methods")) == {
        Import("torch.nn", True),
        Import("trainer", True),
        Import("trainer.engine", True),
        Import("trainer.methods.base", True),
        Import("trainer.methods.base.Method", True),
        Import("paho", False),
        Import("early", True),
        Import("export", False),
        Import("export.model", False),
    }
