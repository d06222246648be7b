"""Partitions and public data sets stay in their files: nothing else in the product names one."""

import ast
import re

from tests.support.paths import REPOSITORY
from trainer.data.datasets import DATASETS
from trainer.data.partitions import PARTITIONS

ROOMS = ("broker_config", "edge", "edge_node", "export", "trainer")
OWN = {REPOSITORY / "trainer" / "data" / "partitions", REPOSITORY / "trainer" / "data" / "datasets"}
COMMON = {"groups", "sources"}  # words of English too
NAMES = re.compile(rf"(?<![\w-])({'|'.join({*PARTITIONS, *DATASETS} - COMMON)})(?![\w-])")
EXAMPLES = {"edge_node/cli/trial.py": ["neu-cls"]}  # in help


def named(source: str) -> list[str]:
    """The names that stand in texts but docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in docstrings
    ]
    return [name for text in texts if isinstance(text, str) for name in NAMES.findall(text)]


def test_nothing_else_names_one() -> None:
    found = {
        path.relative_to(REPOSITORY).as_posix(): named(path.read_text())
        for room in ROOMS
        for path in (REPOSITORY / room).rglob("*.py")
        if path.parent not in OWN
    }
    assert {path: names for path, names in found.items() if names} == EXAMPLES


def test_a_name_is_found_wherever_it_stands() -> None:
    source = (
        '"""Of iid."""\nScheme("iid", 2)\nhelp = "--partition dirichlet,alpha=1; neu-cls"\nx = '
        '"x-sdd-2"  # iid'
    )
    assert sorted(named(source)) == ["dirichlet", "iid", "neu-cls"]
