"""The table of a process that performs a state machine's effects, read from its source."""

import ast
import inspect
from types import ModuleType


def performed(module: ModuleType) -> set[str]:
    """The names of the types of effects that the process in a module performs."""
    tables = [
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Performers"
    ]
    (table,) = tables
    assert isinstance(table, ast.Dict)
    return {ast.unparse(key).rpartition(".")[2] for key in table.keys if key}
