"""Which room of the house may import which: read from the source, without importing it."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.paths import REPOSITORY

ROOMS = ("broker_config", "edge", "export", "trainer")
TORCH = ("torch", "torchvision")
COMMAND_LINE = ("edge.cli",)


class Import(NamedTuple):
    """A module that is imported, and whether that happens as soon as the importing module is."""

    name: str
    at_once: bool


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import in a module of `package`: `from a import b` counts as `a` and `a.b`, relative names are resolved."""
    yield from _imports(ast.parse(source), package, at_once=True)


def _imports(node: ast.AST, package: str, *, at_once: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, at_once) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            origin = ".".join([*parents, *([child.module] if child.module else [])])
            yield Import(origin, at_once)
            yield from (Import(f"{origin}.{alias.name}", at_once) for alias in child.names)
        else:
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _for_types_only(child)
            yield from _imports(child, package, at_once=at_once and not later)


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def modules() -> dict[str, list[Import]]:
    """Every module of the house by its dotted name, with what it imports."""
    found = {}
    for room in ROOMS:
        for path in (REPOSITORY / room).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            found[name] = list(imports(path.read_text(), package))
    return found


MODULES = modules()


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def room(*packages: str, but: tuple[str, ...] = ()) -> list[str]:
    """The modules of some packages; there must be more than the package itself, or nothing would be tested."""
    found = [name for name in MODULES if within(name, packages) and not within(name, but)]
    assert set(found) - set(packages), f"no module in {packages}"
    return found


def breaches(names: list[str], forbidden: tuple[str, ...], *, only_at_once: bool = False) -> list[str]:
    """`module imports forbidden`, for each such import."""
    return [
        f"{name} imports {found.name}"
        for name in names
        for found in MODULES[name]
        if within(found.name, forbidden) and (found.at_once or not only_at_once)
    ]


def loaded(name: str) -> set[str]:
    """All that importing a module imports at once, through the house's other modules too."""
    done: set[str] = set()
    todo = {name}
    while todo:
        module = todo.pop()
        done.add(module)
        parts = module.split(".")
        parents = {".".join(parts[:count]) for count in range(1, len(parts))}
        todo |= (parents | {found.name for found in MODULES.get(module, []) if found.at_once}) - done
    return done


def test_the_line_imports_neither_training_nor_export_nor_torch():
    assert breaches(room("edge", but=COMMAND_LINE), ("trainer", "export", *TORCH)) == []


def test_the_command_line_imports_training_and_export_only_inside_functions():
    assert breaches(room(*COMMAND_LINE), ("trainer", "export", *TORCH), only_at_once=True) == []


def test_the_coordinators_rooms_never_import_torch():
    assert breaches(room("trainer.federation.server"), TORCH) == []


def test_the_contract_imports_no_other_room_and_no_torch():
    assert breaches(room("broker_config"), ("edge", "export", "trainer", *TORCH)) == []


def test_methods_know_nothing_of_mqtt_or_the_coordinator():
    assert breaches(room("trainer.methods"), ("paho", "trainer.federation.server.coordinator")) == []


def test_methods_import_torch_only_inside_functions():
    assert breaches(room("trainer.methods"), TORCH, only_at_once=True) == []


def test_training_does_not_import_export():
    assert breaches(room("trainer"), ("export",)) == []


def test_nobody_imports_the_command_line():
    others = [name for name in MODULES if not within(name, COMMAND_LINE)]
    assert breaches(others, COMMAND_LINE) == []
    assert breaches(room("edge.cli", but=("edge.cli.main",)), ("edge.cli.main",)) == []


@pytest.mark.parametrize(
    "package", ["edge", "broker_config", "trainer.federation.server", "trainer.data.checks", "trainer.methods"]
)
def test_torch_is_not_loaded_through_another_module_either(package):
    assert [name for name in room(package) if loaded(name) & set(TORCH)] == []


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
