"""The style that no linter checks, read from the syntax tree of the product."""

import ast
import tomllib
from collections.abc import Iterator

import pytest

from tests.support.paths import REPOSITORY

ROOMS = ("broker_config", "edge", "edge_node", "export", "trainer")  # what the wheel holds
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
SIZES = ({"width", "height"}, {"rows", "columns"})


def parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    """The node around each node."""
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def nested_conditionals(tree: ast.AST) -> Iterator[ast.expr]:
    """Conditional expressions that are not all of what is assigned or returned."""
    around = parents(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            outer = around[node]
            if not (isinstance(outer, (*ASSIGNMENTS, ast.Return)) and outer.value is node):
                yield node


def parallel_assignments(tree: ast.AST) -> Iterator[ast.stmt]:
    """Assignments of several values at once, except a swap and a size."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            values = node.value.elts
            is_one_value = any(isinstance(each, ast.Starred) for each in values)
            for target in node.targets:
                if not isinstance(target, ast.Tuple | ast.List) or is_one_value:
                    continue
                names = {ast.unparse(each) for each in target.elts}
                if names != {ast.unparse(each) for each in values} and names not in SIZES:
                    yield node


def nested_comprehensions(tree: ast.AST) -> Iterator[ast.expr]:
    """Comprehensions in comprehensions, and those with two `for`."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            inner = [each for each in ast.walk(node) if isinstance(each, COMPREHENSIONS)]
            if len(node.generators) > 1 or len(inner) > 1:
                yield node


RULES = (nested_conditionals, parallel_assignments, nested_comprehensions)
BREACHES = {
    nested_conditionals: (
        "f(a if b else c)",
        "[a if b else c for a in d]",
        "x = a if b else c or d if e else f",
    ),
    parallel_assignments: ("a, b = 1, 2", "[self.a, b] = [c, d]", "(a, b), c = d, e"),
    nested_comprehensions: (
        "[a for b in c for a in b]",
        "{a: [b for b in c] for a in d}",
        "(a for a in [*(b for b in c)])",
    ),
}
ALLOWED = {
    nested_conditionals: (
        "x = a if b else c",
        "x: int = a if b else c",
        "def f():\n    return a if b else c",
    ),
    parallel_assignments: (
        "a, b = b, a",
        "width, height = 1, 2",
        "a, b = c",
        "for a, b in c: pass",
        "a = b, c",
        "a, *b = [*c, 0]",
    ),
    nested_comprehensions: (
        "[a for a in b]",
        "[list(a) for a in b]",
        "f([a for a in b], [c for c in d])",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_finds_each_breach_and_nothing_else(rule) -> None:
    assert [each for each in BREACHES[rule] if not list(rule(ast.parse(each)))] == []
    assert [each for each in ALLOWED[rule] if list(rule(ast.parse(each)))] == []


@pytest.mark.parametrize("rule", RULES)
def test_the_product_keeps_the_rule(rule) -> None:
    found = []
    for room in ROOMS:
        for path in sorted((REPOSITORY / room).rglob("*.py")):
            for node in rule(ast.parse(path.read_text())):
                found.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_lines_have_at_most_100_columns() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["ruff"]
    assert settings["line-length"] == 100
    assert "E" in settings["lint"]["select"]
    assert "E501" not in settings["lint"]["ignore"]
