"""Fields that messages of v1 once had. Their default is still accepted; any other value is refused by name."""

from collections.abc import Mapping

import msgspec

from broker_config.protocol.errors import abbreviate

RETIRED_FIELDS: Mapping[str, Mapping[str, object]] = {
    "Spec": {"staleness": 0, "min_wait": 0.0, "start": 0},
    "Accepted": {"counted_in": 0},
}
"""Message -> field -> its default. A message without the field means the default, as it always has."""

REMEDY = "finish the run with the version of edge-node that began it"


def find_fault(message: str, payload: bytes) -> str:
    """Return what a message (its type, and its JSON, which has been decoded) asks for in vain; empty if nothing."""
    defaults = RETIRED_FIELDS.get(message)
    if defaults is None:
        return ""
    sent = msgspec.json.decode(payload)
    for field, default in defaults.items():
        value = sent.get(field, default)
        if value != default:
            return f"this version of edge-node has no {field}, and the {message} has {abbreviate(str(value), 60)}"
    return ""
