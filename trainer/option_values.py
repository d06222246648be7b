"""Options of a method or a partition, read as people write them."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from broker_config.protocol.errors import UsageError, suggest

S = TypeVar("S", bound=msgspec.Struct)
# as msgspec writes them
_RELATIONS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def read_options(kind: type[S], name: str, given: Mapping[str, Any]) -> S:
    """The options `kind` of what has this name, with defaults filled in;
    texts are read as a field's type.

    Raises:
        UsageError: no such option, or a value out of range; the nearest name is given.
    """
    known = _types(kind)
    for option in given:
        if option not in known:
            remedy = suggest(option, known) if known else f"{name} has no options: leave it out"
            raise UsageError(f"{name} has no option {option!r}", remedy)
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"an option of {name} cannot have this value: {error}", allowed(str(error), known)
        ) from error


@cache
def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The type of each option by its name, read once:
    compiling annotations takes longer than checking options.
    """
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def allowed(error: str, types: Mapping[str, Any]) -> str:
    """The remedy for msgspec's complaint about one field: the values that the field may take."""
    field = error.rsplit(".", 1)[-1].rstrip("`")
    choices = get_args(types[field]) if get_origin(types.get(field)) is Literal else ()
    if choices:
        return f"{field} is one of {', '.join(map(str, choices))}"
    bound = re.search(r"(>=|<=|>|<) (\S+)", error)
    return (
        f"give {field} a value {_RELATIONS[bound[1]]} {bound[2]}"
        if bound
        else f"give {field} a value of its type"
    )
