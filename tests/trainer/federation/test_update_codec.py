"""Coded tensors: how much is lost, that nothing else is, and that bytes from outside do no harm."""

from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.numpy import load, save

from broker_config.protocol.codec import DecodeError, encode_tensors
from broker_config.protocol.messages import TensorSpec
from tests.support.node_model import make_spec
from trainer.federation.update_codec import (
    decode,
    decode_broadcast,
    encode,
    encode_start,
    is_coded,
    largest_coded,
    round_start,
)
from trainer.models.named_tensors import Arrays

SHAPES = {
    "conv.weight": (6, 3, 3, 3),
    "depthwise.weight": (5, 1, 3, 3),
    "linear.weight": (3, 7),
    "norm.bias": (6,),
    "norm.running_var": (6,),
    "temperature": (),
}
STEPS = 7  # from zero to a channel's largest update
seeds = st.integers(0, 2**32)


def drawn(seed: int, size: float = 1.0) -> Arrays:
    """Tensors whose channels differ in size by orders of magnitude."""
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in SHAPES.items():
        sizes = 10.0 ** random.uniform(-6, 2, shape[:1] + (1,) * (len(shape) - 1))
        found[name] = np.asarray(size * sizes * random.normal(size=shape), np.float32)
    return found | {"norm.running_var": np.abs(found["norm.running_var"])}


def specs(tensors: Arrays) -> dict[str, TensorSpec]:
    return {name: TensorSpec(array.shape, 0, array.dtype.name) for name, array in tensors.items()}  # type: ignore[arg-type]


def through(tensors: Arrays, held: Arrays, averaged: Any = SHAPES) -> Arrays:
    return decode(encode(tensors, held, averaged), specs(tensors), held)


def added(tensors: Arrays, updates: Arrays) -> Arrays:
    return {
        name: np.asarray(values + updates[name], np.float32) for name, values in tensors.items()
    }


# What is lost


@given(seed=seeds)
def test_an_update_is_off_by_half_a_step_of_its_channel_at_most(seed: int) -> None:
    held = drawn(seed)
    tensors = added(held, drawn(seed + 1, 0.1))
    for name, found in through(tensors, held).items():
        update = np.abs(tensors[name].astype(np.float64) - held[name])
        largest = update.max(axis=tuple(range(1, update.ndim)), keepdims=True, initial=0)
        half = largest * (1 + 2**-7) / STEPS / 2 if found.ndim > 1 else update * 2**-11 + 2**-25
        rounding = 2**-22 * (np.abs(held[name]) + update)  # of sums in float32
        assert (np.abs(found.astype(np.float64) - tensors[name]) <= half + rounding).all(), name


@given(seed=seeds)
def test_what_has_not_changed_costs_nothing_and_stays_as_it_was(seed: int) -> None:
    """A node whose encoder has not moved, say."""
    held = drawn(seed)
    found = through(held, held)
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in held.items()
    }
    assert len(encode(held, held, SHAPES)) < 40


@given(seed=seeds)
def test_the_same_tensors_give_the_same_bytes_and_a_variance_stays_one(seed: int) -> None:
    held, tensors = drawn(seed), drawn(seed + 1)
    tensors["norm.running_var"][:] = 0
    blob = encode(tensors, held, SHAPES)
    assert blob == encode(dict(reversed(tensors.items())), held, SHAPES)
    assert decode(blob, specs(tensors), held)["norm.running_var"].min() >= 0


@given(seed=seeds)
def test_what_is_no_update_of_training_loses_nothing(seed: int) -> None:
    """Sums, what is relayed, and what the coordinator alone has made."""
    random = np.random.default_rng(seed)
    tensors = drawn(seed) | {
        "sums": random.integers(-(2**62), 2**62, (4, 5)),
        "owners": np.float32([2**24 - 1, -1]),
    }
    found = through(tensors, drawn(seed + 1), averaged=())
    assert encode_tensors(found) == encode_tensors(tensors)


def test_rounds_of_updates_approach_what_they_aim_at() -> None:
    """What one round loses is in the next one's update: that is what needs no memory of errors."""
    held, aim = drawn(1), drawn(2)
    distance = [float("inf")]
    for _ in range(12):
        held = through(aim, held)
        distance.append(max(float(np.abs(held[name] - aim[name]).max(initial=0)) for name in aim))
        assert distance[-1] <= distance[-2]
    assert distance[-1] < distance[1] / 10


def test_an_update_beyond_float16_is_sent_as_it_is() -> None:
    held = drawn(1)
    tensors = held | {"norm.bias": np.full(6, 1e6, np.float32)}
    assert (through(tensors, held)["norm.bias"] == 1e6).all()


@given(seed=seeds)
def test_a_run_begins_with_half_floats_but_for_vectors_and_what_is_beyond_them(seed: int) -> None:
    tensors = drawn(seed) | {
        "linear.weight": np.full((3, 7), 1e5, np.float32),
        "count": np.arange(4),
    }
    start = round_start(tensors, "int4")
    for name, values in start.items():
        assert (values.dtype, values.shape) == (tensors[name].dtype, tensors[name].shape)
        if name in ("conv.weight", "depthwise.weight"):
            np.testing.assert_allclose(values, tensors[name], rtol=2**-11, atol=2**-25)
            assert np.array_equal(values, values.astype(np.float16))
        else:
            assert np.array_equal(values, tensors[name])
    assert round_start(tensors, "none") is tensors
    assert all(
        np.array_equal(values, start[name]) for name, values in round_start(start, "int4").items()
    )


@given(seed=seeds)
def test_a_first_broadcast_is_read_against_nothing_and_loses_nothing(seed: int) -> None:
    start = round_start(drawn(seed) | {"linear.weight": np.full((3, 7), 1e5, np.float32)}, "int4")
    spec = replace(make_spec(), codec="int4", tensors=specs(start))
    found = decode_broadcast(spec, 1, encode_start(spec, start), {})
    assert encode_tensors(found) == encode_tensors(start)


def test_half_floats_against_nothing_are_refused_for_whole_numbers_and_beside_held_ones() -> None:
    half = zstandard.compress(save({"update.sums": np.ones(2, np.float16)}))
    whole, real = ({"sums": TensorSpec((2,), 0, dtype)} for dtype in ("int64", "float32"))
    with pytest.raises(DecodeError, match="'sums' is missing"):
        decode(half, whole, {})
    with pytest.raises(DecodeError, match="'sums' is missing"):
        decode(half, real, HELD)
    assert decode(half, real, {})["sums"].tolist() == [1, 1]


def test_a_first_broadcast_takes_half_the_bytes() -> None:
    start = round_start(
        {"linear.weight": np.random.default_rng(1).normal(size=(300, 70)).astype(np.float32)},
        "int4",
    )
    spec = replace(make_spec(), codec="int4", tensors=specs(start))
    assert len(encode_start(spec, start)) < 0.51 * len(encode_tensors(start))
    assert encode_start(replace(spec, codec="none"), start) == encode_tensors(start)


def test_four_bits_take_an_eighth_of_the_bytes() -> None:
    random = np.random.default_rng(0)
    held = {"layer.weight": random.normal(size=(64, 512)).astype(np.float32)}
    tensors = added(held, {"layer.weight": random.normal(0, 0.01, (64, 512)).astype(np.float32)})
    plain = len(encode_tensors(tensors))
    assert len(encode(tensors, held, held)) < 0.13 * plain


# Bytes from outside

HELD, TENSORS = drawn(3), drawn(4)
BLOB = encode(TENSORS, HELD, SHAPES)


def frame(change: Any) -> bytes:
    """A coded blob whose parts `change` has changed in place."""
    parts = load(zstandard.decompress(BLOB))
    change(parts)
    return zstandard.compress(save(parts))


def refused(blob: bytes) -> str:
    with pytest.raises(DecodeError) as error:
        decode(blob, specs(TENSORS), HELD)
    return str(error.value)


def test_a_coded_blob_is_told_by_its_first_bytes() -> None:
    assert is_coded(BLOB)
    assert not is_coded(encode_tensors(TENSORS))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda parts: parts.pop("scale.conv.weight"), "'scale.conv.weight' is missing"),
        (
            lambda parts: parts.update({"update.other": parts["update.norm.bias"]}),
            "1 tensors too many",
        ),
        (
            lambda parts: parts.update({"value.conv.weight": np.zeros(3, np.float32)}),
            r"float32 [3], not float32 [6, 3",
        ),
        (
            lambda parts: parts.update({"value.norm.bias": np.zeros(6)}),
            "float64 [6], not float32 [6]",
        ),
        (
            lambda parts: parts.update({"update.linear.weight": np.zeros((3, 7), np.int8)}),
            "not uint8 [11]",
        ),
        (
            lambda parts: parts.update({"scale.linear.weight": np.zeros(2, np.uint16)}),
            "uint16 [2], not uint16 [3]",
        ),
        (lambda parts: parts["scale.conv.weight"].fill(0x7F80), "NaN or infinity"),
        (lambda parts: parts["update.norm.bias"].fill(np.nan), "NaN or infinity"),
        (
            lambda parts: parts.update({"value.temperature": np.array(np.inf, np.float32)}),
            "NaN or infinity",
        ),
    ],
)
def test_parts_that_are_not_the_expected_ones_are_refused(change: Any, why: str) -> None:
    assert why in refused(frame(change))


def test_a_frame_that_promises_more_than_tensors_take_is_not_unpacked() -> None:
    bomb = zstandard.compress(bytes(10**9))
    assert f"promises 1000000000 bytes; {largest_coded(specs(TENSORS))} are the most" in refused(
        bomb
    )
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10**6))
    assert "promises -1 bytes" in refused(unsized)
    assert "not a zstd frame" in refused(BLOB + b"more")


def test_what_the_other_side_does_not_hold_cannot_be_left_out() -> None:
    with pytest.raises(DecodeError, match="'sums' is missing"):
        decode(encode({}, {}, ()), {"sums": TensorSpec((2,), 0, "int64")}, {})


@given(
    cut=st.integers(0, len(BLOB) - 1), place=st.integers(0, len(BLOB) - 1), bit=st.integers(0, 7)
)
def test_truncated_and_changed_bytes_are_refused_or_give_finite_tensors(
    cut: int, place: int, bit: int
) -> None:
    changed = bytearray(BLOB)
    changed[place] ^= 1 << bit
    for blob in (BLOB[:cut], bytes(changed)):
        try:
            found = decode(blob, specs(TENSORS), HELD)
        except DecodeError:
            continue
        assert all(
            np.isfinite(array).all() and array.shape == SHAPES[name]
            for name, array in found.items()
        )


@given(st.binary(max_size=200))
def test_any_bytes_in_a_frame_are_refused(data: bytes) -> None:
    assert refused(zstandard.compress(data))
