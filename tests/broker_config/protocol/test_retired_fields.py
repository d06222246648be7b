"""Fields that v1 messages once had: what changed nothing is still read, and the rest is refused by name."""

import json

import pytest

from broker_config.protocol.codec import DecodeError, decode_any
from broker_config.protocol.retired_fields import REMEDY, RETIRED_FIELDS
from tests.support.paths import WIRE_FILE

WIRE_V1 = json.loads(WIRE_FILE.read_text())


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, of in RETIRED_FIELDS.items() for field in of])
def test_a_retired_field_is_read_if_it_changes_nothing_and_else_refused_by_its_name(kind: str, field: str) -> None:
    without = {name: value for name, value in WIRE_V1[kind].items() if name != field}
    harmless = without | {field: RETIRED_FIELDS[kind][field]}
    assert decode_any(json.dumps(harmless).encode()) == decode_any(json.dumps(without).encode())
    with pytest.raises(DecodeError, match=field) as caught:
        decode_any(json.dumps(without | {field: 7}).encode())
    assert REMEDY in str(caught.value)
