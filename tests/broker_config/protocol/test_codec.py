"""Messages and tensors survive the wire; what is not one of ours is refused in words."""

import json
import math
from pathlib import Path
from secrets import token_hex
from typing import Literal

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from broker_config.protocol import messages
from broker_config.protocol.codec import (
    MAX_MESSAGE,
    DecodeError,
    decode,
    decode_any,
    decode_chunk,
    encode,
    encode_chunk,
    encode_tensors,
    encoded_size,
    read_tensors,
)
from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import TensorSpec
from tests.support.paths import WIRE_FILE
from tests.support.wire_messages import CASES, RUN

WIRE_V1: dict[str, dict] = json.loads(WIRE_FILE.read_text())
each_case = pytest.mark.parametrize("message", CASES, ids=lambda message: type(message).__name__)


def test_the_table_has_every_message() -> None:
    assert {type(case) for case in CASES} == set(messages.AnyMessage.__args__)


@each_case
def test_a_message_comes_back_as_it_was(message: messages.AnyMessage) -> None:
    assert decode_any(encode(message)) == message
    assert decode(encode(message), type(message)) == message


@each_case
def test_the_first_version_s_bytes_decode_for_ever(message: messages.AnyMessage) -> None:
    assert decode_any(json.dumps(WIRE_V1[type(message).__name__]).encode()) == message


@each_case
def test_fields_of_a_later_version_are_ignored(message: messages.AnyMessage) -> None:
    later = json.loads(msgspec.json.encode(message)) | {"invented_later": {"deep": [1]}}
    assert decode_any(json.dumps(later).encode()) == message


@each_case
def test_a_truncated_message_is_refused(message: messages.AnyMessage) -> None:
    payload = encode(message)
    for length in range(len(payload)):
        with pytest.raises(DecodeError):
            decode_any(payload[:length])


@each_case
def test_a_message_in_the_place_of_another_is_refused(message: messages.AnyMessage) -> None:
    other = messages.Finished if isinstance(message, messages.Welcome) else messages.Welcome
    with pytest.raises(DecodeError, match=rf"{type(message).__name__}\b.*\b{other.__name__}"):
        decode(encode(message), other)


def test_missing_fields_with_a_default_are_filled() -> None:
    payload = json.dumps(
        {"type": "RoundState", "run": RUN, "round": 0, "status": "gathering"}
    ).encode()
    assert decode_any(payload) == messages.RoundState(
        run=RUN, round=0, status="gathering", broadcast=None, reason=""
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"type": "Telepathy"}, "Telepathy"),
        ({"session": "short"}, r"\$.session"),
        ({"session": None}, "null"),
        ({"round": -1}, "round"),
        ({"round": 1.5}, "round"),
        ({"round": 10**30}, "round"),
        ({"weight": 1e31}, "weight"),
        ({"weight": "0.5"}, "weight"),
        (
            {"blob": {**WIRE_V1["Contribution"]["blob"], "digest": "../../etc/passwd"}},
            r"\$.blob.digest",
        ),
        ({"blob": {**WIRE_V1["Contribution"]["blob"], "size": 0}}, r"\$.blob.size"),
        ({"blob": {**WIRE_V1["Contribution"]["blob"], "node": "a/b"}}, r"\$.blob.node"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_and_named(change: dict, complaint: str) -> None:
    with pytest.raises(DecodeError, match=complaint):
        decode_any(json.dumps(WIRE_V1["Contribution"] | change).encode())


@pytest.mark.parametrize("weight", ["NaN", "Infinity", "1e999"])
def test_a_weight_that_is_no_finite_number_is_refused(weight: str) -> None:
    text = json.dumps(WIRE_V1["Contribution"] | {"weight": 0.125}).replace("0.125", weight)
    with pytest.raises(DecodeError):
        decode_any(text.encode())


@pytest.mark.parametrize(
    "payload",
    [
        json.dumps({"type": "\x1b[2Jx" * 10_000}).encode(),
        json.dumps(WIRE_V1["RoundState"] | {"status": "\n" * 50_000}).encode(),
    ],
)
def test_what_is_wrong_with_a_message_is_said_briefly_and_in_printable_words(
    payload: bytes,
) -> None:
    with pytest.raises(DecodeError, match=r"^.{50,400}$") as caught:
        decode_any(payload)
    assert str(caught.value).isprintable()


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_noise_is_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_any(payload)


@given(st.sampled_from(CASES), st.data())
def test_a_damaged_message_is_refused_or_still_valid(
    message: messages.AnyMessage, data: st.DataObject
) -> None:
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        survivor = decode_any(bytes(payload))
    except DecodeError:
        return
    assert decode_any(encode(survivor)) == survivor


def test_a_message_has_a_largest_size_both_ways() -> None:
    classes = tuple(f"class {number:095}" for number in range(1000))
    with pytest.raises(EdgeNodeError, match="Spec"):
        encode(msgspec.structs.replace(CASES[0], classes=classes))
    with pytest.raises(DecodeError, match="longer than"):
        decode_any(b" " * (MAX_MESSAGE + 1))


def test_keys_and_shares_of_many_nodes_travel_at_hardly_more_than_their_bytes() -> None:
    """Of each node 160 bytes of keys, and 82 that hold shares; its name comes twice."""
    step = messages.MaskingStep(
        run=RUN,
        round=1,
        members={
            f"plant-{node:03}": messages.PublicKeys(
                agreement=token_hex(32),
                cipher=token_hex(32),
                commitment=token_hex(32),
                signature=token_hex(64),
            )
            for node in range(100)
        },
        shares={f"plant-{node:03}": token_hex(82) for node in range(100)},
    )
    assert len(encode(step)) < 1.1 * 100 * (160 + 82) < len(msgspec.json.encode(step)) / 2


@pytest.mark.parametrize("kind", ["MaskingStep", "Presence"])
def test_any_message_is_read_whether_it_is_compressed_or_not(kind: str) -> None:
    text = json.dumps(WIRE_V1[kind]).encode()
    assert decode_any(zstandard.compress(text)) == decode_any(text)


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (
            zstandard.compress(b" " * (MAX_MESSAGE + 1)),
            "promises 102401 bytes; 102400 are the most",
        ),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"{}"), "promises -1 bytes"),
        (zstandard.compress(b" " * MAX_MESSAGE)[:-1], "not a zstd frame"),
        (
            zstandard.compress(b" " * 70_000).replace(
                (70_000).to_bytes(4, "little"), bytes([100, 0, 0, 0])
            ),
            "too small",
        ),
        (zstandard.compress(json.dumps(WIRE_V1["Presence"]).encode()) + b"{}", "not a zstd frame"),
        (zstandard.compress(zstandard.compress(json.dumps(WIRE_V1["Presence"]).encode())), "JSON"),
    ],
    ids=[
        "larger than a message",
        "of unknown size",
        "cut short",
        "of more than it says",
        "with more behind it",
        "of a frame",
    ],
)
def test_a_frame_that_holds_no_message_is_refused_before_it_takes_memory(
    frame: bytes, complaint: str
) -> None:
    with pytest.raises(DecodeError, match=complaint):
        decode_any(frame)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(DecodeError):
        decode_any(b'{"type":"Presence","x":' + b"[" * 50_000)


TENSORS = {
    "weight": np.array([[0.0, -0.0, 1.5], [1e-45, -3.4e38, 2**-126]], np.float32),
    "bias é": np.arange(5, dtype=np.float32),
    "scalar": np.array(7, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "sums": np.array([[-(2**63), -1], [0, 2**63 - 1]]),
}
EXPECTED = {name: TensorSpec(array.shape, 0, array.dtype.name) for name, array in TENSORS.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "blob"


def test_tensors_come_back_bit_for_bit_and_stay_what_they_are_when_the_file_changes(
    file: Path,
) -> None:
    file.write_bytes(encode_tensors(TENSORS))
    back = dict(read_tensors(file, EXPECTED))
    # in place: of a file that were mapped, the tensors would change with it
    with file.open("r+b") as changed:
        changed.write(bytes(file.stat().st_size))
    assert list(back) == sorted(TENSORS)
    for name, array in back.items():
        was = TENSORS[name]
        assert (array.tobytes(), array.shape, array.dtype) == (was.tobytes(), was.shape, was.dtype)
        assert array.flags.writeable


def test_the_bytes_of_tensors_depend_on_neither_order_nor_memory_layout() -> None:
    backwards = {name: np.array(array, order="F") for name, array in reversed(TENSORS.items())}
    assert encode_tensors(backwards) == encode_tensors(TENSORS)


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool"])
def test_only_float32_and_int64_are_encoded(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"'steps' is {dtype}"):
        encode_tensors({"steps": np.zeros(3, dtype)})


def test_tensors_are_read_one_at_a_time(file: Path) -> None:
    file.write_bytes(
        encode_tensors({"a": np.ones(3, np.float32), "b": np.array([1, math.nan], np.float32)})
    )
    tensors = read_tensors(file, {"a": TensorSpec((3,), 0), "b": TensorSpec((2,), 0)})
    assert next(tensors)[0] == "a"
    with pytest.raises(DecodeError, match=r"'b'.*NaN"):
        next(tensors)


GOOD = encode_tensors(TENSORS)
HOSTILE = {
    "nothing": (b"", "header too small"),
    "noise": (bytes(range(256)), "safetensors"),
    "half a header length": (GOOD[:5], "header too small"),
    "half a header": (GOOD[:40], "header"),
    "no data": (GOOD[: 8 + int.from_bytes(GOOD[:8], "little")], "not fully covered"),
    "one byte short": (GOOD[:-1], "not fully covered"),
    "one byte more": (GOOD + b"\0", "not fully covered"),
    "much more": (GOOD + bytes(10_000), "larger than its tensors"),
    "an absurd header length": ((2**63).to_bytes(8, "little") + GOOD[8:], "header too large"),
    "a header that is no JSON": (GOOD[:8] + b"x" + GOOD[9:], "header"),
    "metadata": (save(TENSORS, {"by": "me"}), "__metadata__"),
    "a missing tensor": (
        encode_tensors({"weight": TENSORS["weight"]}),
        "4 tensors are missing, the first is 'bias é'",
    ),
    "a tensor too many": (
        encode_tensors(TENSORS | {"z": TENSORS["scalar"]}),
        "1 tensors too many, the first is 'z'",
    ),
    "another shape": (
        encode_tensors(TENSORS | {"weight": TENSORS["weight"].T}),
        r"\(3, 2\), not \(2, 3\)",
    ),
    "float16": (save(TENSORS | {"scalar": np.array(7, np.float16)}), "'scalar' is F16"),
    "int32": (save(TENSORS | {"scalar": np.array(7, np.int32)}), "'scalar' is I32"),
    "int64 for float32": (save(TENSORS | {"scalar": np.array(7)}), "'scalar' is I64, not F32"),
    "float32 for int64": (
        save(TENSORS | {"sums": np.ones((2, 2), np.float32)}),
        "'sums' is F32, not I64",
    ),
    "float64 for int64": (save(TENSORS | {"sums": np.ones((2, 2))}), "'sums' is F64, not I64"),
    "uint64 for int64": (
        save(TENSORS | {"sums": np.ones((2, 2), np.uint64)}),
        "'sums' is U64, not I64",
    ),
    "other sums": (save(TENSORS | {"sums": np.ones((4, 1), np.int64)}), r"\(4, 1\), not \(2, 2\)"),
    "NaN": (
        encode_tensors(TENSORS | {"scalar": np.array(math.nan, np.float32)}),
        "'scalar' holds NaN",
    ),
    "infinity": (
        encode_tensors(TENSORS | {"scalar": np.array(-math.inf, np.float32)}),
        "'scalar' holds NaN or inf",
    ),
}


@pytest.mark.parametrize(("content", "complaint"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_tensors_are_refused(file: Path, content: bytes, complaint: str) -> None:
    file.write_bytes(content)
    with pytest.raises(DecodeError, match=complaint):
        list(read_tensors(file, EXPECTED))


@given(st.data())
def test_damaged_tensors_are_refused_or_have_the_right_shapes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(GOOD)
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged"
    file.write_bytes(content)
    try:
        back = dict(read_tensors(file, EXPECTED))
    except DecodeError:
        return
    assert {name: array.shape for name, array in back.items()} == {
        name: spec.shape for name, spec in EXPECTED.items()
    }


@given(
    st.dictionaries(st.text(max_size=30), st.lists(st.integers(0, 4), max_size=4), max_size=8),
    st.sampled_from(["float32", "int64"]),
)
def test_the_promised_size_is_a_tight_upper_bound(
    shapes: dict[str, list[int]], dtype: Literal["float32", "int64"]
) -> None:
    size = len(encode_tensors({name: np.zeros(shape, dtype) for name, shape in shapes.items()}))
    bound = encoded_size(
        {name: TensorSpec(tuple(shape), 0, dtype) for name, shape in shapes.items()}
    )
    assert size <= bound <= size + 64 + 300 * len(shapes)


def test_a_chunk_carries_its_index() -> None:
    assert encode_chunk(258, b"data") == b"\0\0\1\2data"
    index, data = decode_chunk(b"\0\0\1\2data")
    assert (index, bytes(data)) == (258, b"data")
    with pytest.raises(DecodeError, match="no index"):
        decode_chunk(b"\0\0\1")
