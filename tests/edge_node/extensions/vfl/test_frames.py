"""The frames of a line: what is one comes back as it was, and what is none is refused,
whatever it is.
"""

from random import getrandbits
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from broker_config.protocol.codec import DecodeError
from edge_node.extensions.vfl.frames import (
    LARGEST_FRAME,
    AnyFrame,
    Embedded,
    Embeddings,
    Graded,
    Opened,
    Represented,
    decode_frame,
    encode_frame,
)
from tests.support.fuzz_frames import FRAMES, RUN, attack, samples

KINDS = (Opened, Embeddings, Represented, Graded, Embedded)


def drawn(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field, as far as its type lets them go."""
    match kind:
        case inspect.Metadata():
            return drawn(kind.type)
        case inspect.IntType():
            return st.integers(kind.ge, kind.le)
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le)
        case inspect.StrType(pattern=None):
            return st.text(min_size=kind.min_length, max_size=kind.max_length)
        case inspect.StrType():
            return st.from_regex(kind.pattern)
        case inspect.BytesType():
            return st.binary()
        case inspect.VarTupleType():
            return st.lists(drawn(kind.item_type), max_size=min(kind.max_length, 50)).map(tuple)
    raise AssertionError(kind)


def frames(kind: type[AnyFrame]) -> st.SearchStrategy[AnyFrame]:
    """All that a kind of frame can say."""
    fields = inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return st.builds(kind, **{field.name: drawn(field.type) for field in fields})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=50)
def test_every_frame_comes_back_as_it_was(kind: type[AnyFrame], data: st.DataObject) -> None:
    frame = data.draw(frames(kind))
    assert decode_frame(encode_frame(frame)) == frame


def test_hostile_bytes_are_refused_at_once_and_crash_and_fill_nothing() -> None:
    seed = getrandbits(32)
    print(f"seed {seed}")
    attack(FRAMES, seed)


def test_what_the_hostile_bytes_are_made_of_is_understood() -> None:
    """Else all of them would be refused for the same reason."""
    for frame in samples():
        assert decode_frame(encode_frame(frame)) == frame


def test_a_frame_may_fill_a_packet_and_not_a_byte_more() -> None:
    rest = len(encode_frame(Embedded(run=RUN, round=1, product="p", embedding=bytes(1 << 17))))
    fits = Embedded(
        run=RUN, round=1, product="p", embedding=bytes(LARGEST_FRAME - rest + (1 << 17))
    )
    whole = encode_frame(fits)
    assert (len(whole), decode_frame(whole)) == (LARGEST_FRAME, fits)
    with pytest.raises(DecodeError, match="1048576"):
        decode_frame(whole + b"\0")
