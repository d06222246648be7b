"""Digests to which one-time secrets are bound: of everything that determines the bytes that leave.

The rule, for masks, noise, keys, entries of a privacy account and plant checks that have passed:
none follows from a name (a run, a round) alone. Each also follows from the digest of the spec:
method, options, tensors, scales. Noise also follows from the round, the images and the tensors that
the round starts from. So a secret that hides one thing never hides another.
"""

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from broker_config.protocol.messages import CommonSpec


def digest_spec(spec: CommonSpec) -> str:
    """Return the SHA-256 of a spec's meaning, hexadecimal.

    Hash the type's name, a line feed, and the fields as JSON without white space, keys sorted.
    A field that has its default is left out, so that versions with more fields agree; a floating
    point number is an object with the text of its eight bytes, in hexadecimal, the highest first,
    as `double`.
    """
    fields = msgspec.json.encode(_express(spec), order="sorted")
    return hashlib.sha256(type(spec).__name__.encode() + b"\n" + fields).hexdigest()


def bind(*parts: str | bytes) -> str:
    """Return a digest of a sequence of parts, hexadecimal: no other sequence has the same."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "big"))
        hashed.update(data)
    return hashed.hexdigest()


def _express(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        found = {}
        for field in msgspec.structs.fields(value):
            content = getattr(value, field.name)
            if content != _default(field):
                found[field.encode_name] = _express(content)
        return found
    if isinstance(value, Mapping):
        return {str(name): _express(content) for name, content in value.items()}
    if isinstance(value, list | tuple):
        return [_express(content) for content in value]
    return {"double": struct.pack(">d", value).hex()} if isinstance(value, float) else value


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
