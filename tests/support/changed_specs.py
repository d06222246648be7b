"""Specs that differ from one in a single field, as a coordinator could announce them."""

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


def changed(spec: S) -> Iterator[tuple[str, S]]:
    """For each field its name, and the spec with another value there; of structs and mappings,
    one for each field within.
    """
    for name in spec.__struct_fields__:
        for value in _others(getattr(spec, name)):
            yield name, msgspec.structs.replace(spec, **{name: value})


def _others(value: Any) -> Iterator[Any]:
    if isinstance(value, msgspec.Struct):
        yield from (other for _, other in changed(value))
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, str):
        yield f"{value}x"
    elif isinstance(value, dict):
        yield {**value, "another": next(iter(value.values()), 1)}
        for name, content in value.items():
            for other in _others(content):
                yield {**value, name: other}
    elif isinstance(value, tuple | list):
        yield (*value, "another")
    elif value is None:
        yield 1
    else:
        raise TypeError(type(value))
