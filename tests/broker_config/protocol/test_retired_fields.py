"""Fields that v1 messages once had: what changed nothing is still read,
and the rest is refused by name.
"""

import json
from typing import Any

import pytest

from broker_config.protocol.codec import DecodeError, decode_any
from broker_config.protocol.retired_fields import REMEDY, RETIRED_FIELDS, RETIRED_VALUES
from tests.support.paths import WIRE_FILE

WIRE_V1 = json.loads(WIRE_FILE.read_text())


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, of in RETIRED_FIELDS.items() for field in of]
)
def test_a_retired_field_is_read_if_it_changes_nothing_and_else_refused_by_its_name(
    kind: str, field: str
) -> None:
    without = {name: value for name, value in WIRE_V1[kind].items() if name != field}
    harmless = without | {field: RETIRED_FIELDS[kind][field]}
    assert decode_any(json.dumps(harmless).encode()) == decode_any(json.dumps(without).encode())
    with pytest.raises(DecodeError, match=field) as caught:
        decode_any(json.dumps(without | {field: 7}).encode())
    assert REMEDY in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (kind, field, value)
        for kind, of in RETIRED_VALUES.items()
        for field, values in of.items()
        for value in values
    ],
)
def test_a_retired_value_is_refused_by_its_field_s_name(kind: str, field: str, value: str) -> None:
    told: Any = value
    for name in reversed(field.split(".")):
        told = {name: told}
    with pytest.raises(DecodeError, match=field) as caught:
        decode_any(json.dumps(WIRE_V1[kind] | told).encode())
    assert value in str(caught.value)
    assert REMEDY in str(caught.value)


def test_what_cannot_be_read_for_another_reason_is_refused_for_that() -> None:
    for payload in (
        b"[1]",
        b'{"type": "Spec"}',
        b'{"type": "Spec", "run": 1, "x": ' + b"[" * 50_000,
    ):
        with pytest.raises(DecodeError) as caught:
            decode_any(payload)
        assert REMEDY not in str(caught.value)
