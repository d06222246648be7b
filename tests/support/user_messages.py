"""Every message that a user can meet, read from the source: `python -m tests.support.user_messages` lists missing ones.

A message is a template: what differs from case to case stands in braces. An entry of docs/troubleshooting.md is a list
item that begins with a message in backquotes; the names inside its braces are free.
"""

import ast
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from edge.terminal.explanations import read_entries
from tests.support.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "troubleshooting.md"
ROOMS = ("broker_config", "edge", "export", "trainer", "research")

# Which argument of a call is the message; errors that derive from these are found by themselves.
_POSITIONS = {"EdgeNodeError": 0, "DecodeError": 0, "PeerError": 1, "refusal": 0}
_POSITIONS |= dict.fromkeys(("notify", "notify_once", "_note", "_note_waiting", "_warn", "_warn_once"), 0)  # reports
_POSITIONS |= {"Refuse": 1, "_report_waiting": 1}  # effects of the head
_POSITIONS |= {"Finding": 2}  # what a look at a plant's images finds
_LOGGED = ("warning", "error", "exception")  # what logging prints on standard error
_REFUSALS = ("trainer/federation/server", "trainer/methods")  # whose ValueErrors a coordinator passes on to the node
_TOLD = {  # functions that make messages
    "edge/bundle/expiry.py": "_warning",
    "edge/status/rendering.py": "notices",
    "edge/uncertainty/performance.py": "warnings",
    "trainer/data/checks/image_checks.py": "format_brief",
    "trainer/data/class_names.py": "find_fault",
    "trainer/methods/fedtfi/method.py": "_notice",
    "trainer/progress/events.py": "format_event",
    "trainer/vfl/privacy.py": "describe_spent",
}


class Message(NamedTuple):
    """A template, and where it stands."""

    template: str
    place: str


@functools.cache
def messages() -> list[Message]:
    """All of them, in the order of the source."""
    sources = {
        path: ast.parse(path.read_text()) for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))
    }
    positions = _POSITIONS | dict.fromkeys(_errors(list(sources.values())), 0)
    found = []
    for path, tree in sources.items():
        name = str(path.relative_to(REPOSITORY))
        for function, node in _calls(tree):
            for argument in _message_of(node, positions, name):
                place = f"{name}:{node.lineno}"
                found += [Message(_tidy(each), place) for each in _templates(argument, function)]
        if name in _TOLD:
            found += [Message(_tidy(each), name) for each in _returned(tree, _TOLD[name])]
    return [each for each in found if re.search("[a-z]", re.sub(r"\{.*?\}", "", each.template))]


def entries() -> dict[str, str]:
    """The page's entries: template, with nothing inside its braces -> explanation."""
    return {anonymous(entry.template): entry.text for entry in read_entries()}


def skeleton(missing: list[Message]) -> str:
    """Entries to be filled in."""
    return "".join(f"- `{each.template}`\n  TODO ({each.place})\n" for each in missing)


def missing() -> list[Message]:
    """Messages without an entry, each once."""
    there = entries()
    lacking = [each for each in messages() if anonymous(each.template) not in there]
    return list({anonymous(each.template): each for each in lacking}.values())


def _errors(trees: list[ast.Module]) -> set[str]:
    """The names of EdgeNodeError's descendants."""
    classes = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"EdgeNodeError"}
    while more := {name for name, bases in classes.items() if bases & found} - found:
        found |= more
    return found


def _calls(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.AST | None, ast.Call]]:
    """Every call, with the function that it stands in."""
    for child in ast.iter_child_nodes(tree):
        inside = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call):
            yield inside, child
        yield from _calls(child, inside)


def _message_of(call: ast.Call, positions: dict[str, int], path: str) -> list[ast.expr]:
    """The argument that is a message, if the call makes one."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name in positions:
        return call.args[positions[name] : positions[name] + 1]
    if name in ("Note", "Refusal"):
        return [keyword.value for keyword in call.keywords if keyword.arg in ("text", "reason")]
    logged = name in _LOGGED and owner in ("log", "_log")
    warned = (name, owner) == ("append", "warnings")
    refused = name == "ValueError" and path.startswith(_REFUSALS)
    return call.args[:1] if logged or warned or refused else []


def _templates(node: ast.expr, function: ast.AST | None) -> list[str]:
    """What the expression can be; a name is whatever its function assigns to it."""
    match node:
        case ast.Constant(value=str(text)):
            return [re.sub(r"%[srd]", "{}", text)]
        case ast.JoinedStr():
            return [
                "".join(part.value if isinstance(part, ast.Constant) else f"{{{_name(part)}}}" for part in node.values)
            ]  # type: ignore[misc]
        case ast.IfExp():
            return [*_templates(node.body, function), *_templates(node.orelse, function)]
        case ast.BinOp(op=ast.Add()):
            return [a + b for a in _templates(node.left, function) for b in _templates(node.right, function)]
        case ast.Name() if function is not None and (assigned := list(_assigned(node.id, function))):
            return [each for value in assigned for each in _templates(value, None)]
    return [f"{{{_name(node)}}}"]


def _assigned(name: str, function: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                    yield from (value for each, value in pairs if isinstance(each, ast.Name) and each.id == name)


def _returned(tree: ast.Module, name: str) -> Iterator[str]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == name:
            for node in ast.walk(function):
                if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                    yield from _templates(node.value, function)


def _name(node: ast.AST) -> str:
    """A word for what stands in braces, for a skeleton."""
    words = re.findall(r"[A-Za-z]+", ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node))
    return words[-1].lower() if words else "..."


def _tidy(template: str) -> str:
    return " ".join(template.split())


def anonymous(template: str) -> str:
    """The template with nothing inside its braces."""
    return re.sub(r"\{[^}]*\}", "{}", template)


if __name__ == "__main__":
    print(skeleton(missing()), end="")
