"""Methods stay in their files: nothing in the product outside trainer/methods, and outside the
extension that registers one, names one of them, or a metric of one.
"""

import ast
import re
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest

from broker_config.protocol.messages import Training
from tests.support.paths import REPOSITORY
from trainer.methods import METHODS, complete_options, make

ROOMS = ("broker_config", "edge", "edge_node", "export", "trainer")
METRICS = {
    metric.key
    for name in METHODS
    for metric in make(name, Training(), complete_options(name, {})).metrics
}
COMMON = {"local"}
"""Words of English too: such a method is named only where a text is all that it is,
and given as a method.
"""
OWN = {
    REPOSITORY.joinpath(*each.module.split(".")).parent
    for each in entry_points(group="edge_node.methods")
}
"""Folders of the methods: `trainer/methods`, and those of extensions that register one."""


def outside() -> dict[str, str]:
    """Sources of the product by their path, without the methods' own."""
    return {
        path.relative_to(REPOSITORY).as_posix(): path.read_text()
        for room in ROOMS
        for path in sorted((REPOSITORY / room).rglob("*.py"))
        if not OWN & {*path.parents}
    }


def words(source: str) -> Iterator[tuple[int, str]]:
    """Every identifier, and every word of every text but docstrings, with its line;
    comments are not in the tree.
    """
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield from ((node.lineno, word) for word in re.findall(r"\w+", text))
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield node.lineno, name
            case ast.ImportFrom(module=str(name)):
                yield from ((node.lineno, word) for word in name.split("."))
            case ast.alias(name=name, asname=alias):
                yield from (
                    (node.lineno, word) for word in (*name.split("."), *filter(None, [alias]))
                )


def is_named(word: str) -> bool:
    """Whether a word is a metric of a method, or a method's name stands in it."""
    return word in METRICS or any(name in word.lower() for name in set(METHODS) - COMMON)


def given(source: str) -> Iterator[tuple[int, str]]:
    """Texts that are given as a method: as an argument or a default of that name,
    or compared with one.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.keyword(arg="method", value=ast.Constant(value=str(text))):
                yield node.value.lineno, text
            case ast.AnnAssign(target=ast.Name(id="method"), value=ast.Constant(value=str(text))):
                yield node.lineno, text
            case ast.Compare(
                left=ast.Attribute(attr="method") | ast.Name(id="method"),
                comparators=[ast.Constant(value=str(text))],
            ):
                yield node.lineno, text


def test_nothing_outside_the_methods_names_one_or_a_metric_of_one() -> None:
    found = [
        f"{path}:{line} names {word}"
        for path, source in outside().items()
        for line, word in words(source)
        if is_named(word)
    ]
    assert found == []


def test_nothing_outside_the_methods_asks_for_one_by_a_common_word() -> None:
    assert [
        f"{path}:{line}"
        for path, source in outside().items()
        for line, text in given(source)
        if text in COMMON
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        'if spec.method == "fedper": pass',
        'print(metrics["A_k"])',
        'help = "losses, A_k and accuracy"',
        'text = f"{name}: L_D for {method}"',
        "from trainer.methods import fedper",
        "from trainer.methods.ditto import Options",
        "def fedavg(): pass",
        'class A:\n    method: str = "afedcl"',
        "def f(afedcl=1): pass",
        "def merge_scaffold_steps(): pass",
        "class AFedCLRound: pass",
    ],
)
def test_a_name_is_found_wherever_it_stands(source: str) -> None:
    assert any(is_named(word) for _, word in words(source))


@pytest.mark.parametrize(
    "source", ['f(method="local")', 'class A:\n    method: str = "local"', 'spec.method == "local"']
)
def test_a_common_word_is_found_where_it_is_a_method(source: str) -> None:
    assert [text for _, text in given(source)] == ["local"]


def test_docstrings_and_comments_may_explain() -> None:
    assert not any(
        is_named(word) for _, word in words('"""As FedProx, fedprox."""\n\nx = 1  # afedcl')
    )
