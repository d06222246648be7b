"""Fields that messages of v1 once had.

Their default is still accepted; any other value is refused by name.

So are values that a field once could have.
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from broker_config.protocol.errors import abbreviate

RETIRED_FIELDS: Mapping[str, Mapping[str, object]] = {
    "Spec": {
        "staleness": 0,
        "min_wait": 0.0,
        "start": 0,
        "evaluate_every": 5,
        "regions": {},
        "leaves": 0,
    },
    "Accepted": {"counted_in": 0},
}
"""Message -> field -> its default.

A message without the field means the default, as it always has.
"""

RETIRED_VALUES: Mapping[str, Mapping[str, Collection[str]]] = {
    "Spec": {
        "aggregation.rule": ("median", "trimmed_mean", "norm_clip"),
        "codec": ("fp16", "int8", "int2"),
    },
}
"""Message -> field, with the name of the field that it is part of -> values that it once could
have.
"""

REMEDY = "finish the run with the version of edge-node that began it"


def find_fault(message: str, payload: bytes) -> str:
    """Return what a message (its type, and its JSON,
    which has been decoded) asks for in vain; empty if nothing.
    """
    defaults = RETIRED_FIELDS.get(message)
    if defaults is None:
        return ""
    sent = msgspec.json.decode(payload)
    for field, default in defaults.items():
        value = sent.get(field, default)
        if value != default:
            return (
                f"this version of edge-node has no {field}, and the {message} has "
                f"{abbreviate(str(value), 60)}"
            )
    return ""


def find_value(payload: bytes) -> str:
    """Return which retired value a message has (its JSON, which has not been decoded);
    empty if none.
    """
    sent = msgspec.json.decode(payload)
    if not isinstance(sent, dict):
        return ""
    for field, values in RETIRED_VALUES.get(str(sent.get("type")), {}).items():
        value: Any = sent
        for name in field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value in values:
            return f"this version of edge-node has no {field} {value}"
    return ""
