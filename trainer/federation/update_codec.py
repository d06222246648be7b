"""Coded tensors: what has changed against tensors that both sides hold, quantised,
in one zstd frame. numpy only.

A blob of tensors is either a safetensors file or a zstd frame of one; the frame's first bytes tell.
In the frame each expected tensor stands below one of two prefixes, or not at all where it is the
one that both sides hold:

    value.NAME      itself
    update.NAME     float16, or uint8 [bytes] of int4 symbols: its difference from the one that both
    sides hold; if they
                    hold none, float16 and itself
    scale.NAME      uint16 [channels]: beside symbols, upper halves of float32: what one step of
    them is worth

Quantisation is symmetric, one scale for each output channel (the first axis), rounded half to even,
without random numbers: the same tensors give the same bytes. Two symbols share a byte, and the
frame compresses these.
"""

import math
from collections.abc import Collection, Mapping

import numpy as np
import zstandard
from safetensors import SafetensorError
from safetensors.numpy import load, save

from broker_config.protocol.codec import (
    COMPRESSED_MARK,
    DecodeError,
    decompress,
    encode_tensors,
    encoded_size,
)
from broker_config.protocol.messages import Codec, Spec, TensorSpec
from broker_config.protocol.round_contents import (
    broadcast_tensors,
    contribution_tensors,
    is_statistics_round,
)
from trainer.models.named_tensors import Arrays, select

RECOMMENDED: Codec = "int4"
"""Not told apart from float32 in accuracy, at a seventh to a tenth of the bytes
(docs/results.md).
"""
_BITS = 4  # of a symbol
_LARGEST_HALF = float(np.finfo(np.float16).max)


def encode_contribution(spec: Spec, tensors: Arrays, broadcast: Arrays) -> bytes:
    """The blob that a node sends: of tensors that it has made from the round's broadcast."""
    if spec.codec == "none":
        return encode_tensors(tensors)
    return encode(tensors, broadcast, select(tensors, spec.sends))


def is_coded(blob: bytes) -> bool:
    """Whether a contribution is coded, by its first bytes: one of an older version need not be.

    A safetensors file that began so would have a header of 4 GB.
    """
    return blob.startswith(COMPRESSED_MARK)


def decode_contribution(spec: Spec, round_: int, blob: bytes, broadcast: Arrays) -> Arrays:
    """The tensors of a coded contribution to a round.

    DecodeError if they are not what its nodes send.
    """
    return decode(blob, contribution_tensors(spec, round_), broadcast)


def round_start(tensors: Arrays, codec: Codec) -> Arrays:
    """The tensors that a run begins with, float32 matrices and kernels rounded to float16 unless
    there is no codec.

    A tensor with a value beyond float16 stays as it is.
    """
    return (
        tensors if codec == "none" else {name: _as_half(values) for name, values in tensors.items()}
    )


def _as_half(values: np.ndarray) -> np.ndarray:
    if (
        values.dtype != np.float32
        or values.ndim < 2
        or np.abs(values).max(initial=0) > _LARGEST_HALF
    ):
        return values
    return values.astype(np.float16).astype(np.float32)


def encode_start(spec: Spec, tensors: Arrays) -> bytes:
    """The blob of the first broadcast that travels; coded, it is read against nothing,
    and loses nothing.
    """
    if spec.codec == "none":
        return encode_tensors(tensors)
    parts: Arrays = {}
    for name, values in tensors.items():
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        is_half = values.dtype == np.float32 and np.array_equal(half, values)
        name_text = f"update.{name}" if is_half else f"value.{name}"
        parts[name_text] = half if is_half else values
    return _compress(parts)


def encode_broadcast(
    spec: Spec, round_: int, tensors: Arrays, before: Arrays
) -> tuple[Arrays, bytes]:
    """The tensors that a round has led to, as all hold them from then on,
    and the blob of them that travels.

    What a round of statistics has changed is no update of training, and coded without loss.
    """
    if spec.codec == "none":
        return tensors, encode_tensors(tensors)
    averaged = () if is_statistics_round(spec, round_) else select(tensors, spec.sends)
    blob = encode(tensors, before, averaged)
    return decode_broadcast(spec, round_ + 1, blob, before), blob


def decode_broadcast(spec: Spec, round_: int, blob: bytes, before: Arrays) -> Arrays:
    """The tensors that a round starts from, or the result, of those of the round before.

    DecodeError if it is none.
    """
    return decode(blob, broadcast_tensors(spec, round_), before)


def encode(tensors: Arrays, held: Arrays, averaged: Collection[str]) -> bytes:
    """Return tensors as a coded blob.

    Args:
        tensors: float32 or int64.
        held: those that both sides hold; each has the shape of the tensor of its name.
        averaged: names of the tensors whose updates are quantised; all others are coded without
            loss.
    """
    parts: Arrays = {}
    for name, values in tensors.items():
        before = held.get(name)
        if before is not None and np.array_equal(values, before):
            continue
        if before is None or name not in averaged:
            parts[f"value.{name}"] = values
        else:
            parts |= _quantise(name, values - before) or {f"value.{name}": values}
    return _compress(parts)


def _compress(parts: Arrays) -> bytes:
    return zstandard.compress(
        save({name: np.asarray(part, order="C") for name, part in parts.items()})
    )


def _quantise(name: str, update: np.ndarray) -> Arrays:
    """The parts of a float32 update; none if they cannot hold it."""
    largest = np.abs(update).max(axis=tuple(range(1, update.ndim)), initial=0.0)
    if update.ndim < 2:
        return (
            {f"update.{name}": update.astype(np.float16)} if np.all(largest < _LARGEST_HALF) else {}
        )
    most = np.float32(2 ** (_BITS - 1) - 1)
    scale = _round_up(largest / most)
    step = _along_channels(_widen(scale), update.ndim)
    symbols = np.divide(update, step, out=np.zeros_like(update), where=step > 0)
    symbols = np.clip(np.rint(symbols), -most, most).astype(np.int8)
    return {f"update.{name}": _pack(symbols.ravel()), f"scale.{name}": scale}


def _pack(symbols: np.ndarray) -> np.ndarray:
    """Symbols in two's complement, the first in a byte's lowest bits; zeros fill the last byte."""
    many = 8 // _BITS
    padded = np.pad(symbols, (0, -len(symbols) % many)).view(np.uint8) & (2**_BITS - 1)
    shifted = padded.reshape(-1, many) << np.arange(0, 8, _BITS, dtype=np.uint8)
    return np.asarray(np.bitwise_or.reduce(shifted, axis=1), np.uint8)


def _unpack(packed: np.ndarray, count: int) -> np.ndarray:
    """The symbols that `_pack` packed, float32."""
    shifted = packed[:, None] >> np.arange(0, 8, _BITS, dtype=np.uint8) & np.uint8(2**_BITS - 1)
    sign = 2 ** (_BITS - 1)
    return np.asarray((shifted.ravel()[:count].astype(np.int16) ^ sign) - sign, np.float32)


def _round_up(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 values, not negative, that are not below these."""
    return ((values.view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)


def _widen(scale: np.ndarray) -> np.ndarray:
    return (scale.astype(np.uint32) << 16).view(np.float32)


def _along_channels(values: np.ndarray, dimensions: int) -> np.ndarray:
    return values.reshape(-1, *[1] * (dimensions - 1))


def decode(blob: bytes, expected: Mapping[str, TensorSpec], held: Arrays) -> Arrays:
    """Return the tensors of a coded blob.

    Args:
        blob: as it was received.
        expected: the tensors that it must hold.
        held: those that it was coded against.

    Raises:
        DecodeError: it is no such blob, or holds other tensors, or values that are not finite.
    """
    parts = _open(blob, largest_coded(expected))
    with np.errstate(over="ignore", invalid="ignore"):
        tensors = {name: _restore(name, spec, parts, held) for name, spec in expected.items()}
    if parts:
        raise DecodeError(f"{len(parts)} tensors too many, the first is {min(parts)!r}")
    return tensors


def largest_coded(expected: Mapping[str, TensorSpec]) -> int:
    """Bytes of a coded blob of such tensors, and of what its frame holds, at most."""
    return 2 * encoded_size(expected)  # an update and its scales have a header each


def _open(blob: bytes, most: int) -> Arrays:
    data = decompress(blob, most)
    try:
        return dict(load(data))
    except (SafetensorError, KeyError, ValueError) as error:
        raise DecodeError(f"not a safetensors file in a zstd frame: {error}") from None


def _restore(name: str, spec: TensorSpec, parts: Arrays, held: Arrays) -> np.ndarray:
    """One tensor; its parts are taken out of `parts`."""
    before = held.get(name)
    if f"value.{name}" in parts:
        restored = _take(parts, f"value.{name}", spec.dtype, spec.shape)
    elif before is None:
        if held or spec.dtype != "float32" or f"update.{name}" not in parts:
            raise DecodeError(f"tensor {name!r} is missing")
        restored = _take(parts, f"update.{name}", "float16", spec.shape).astype(np.float32)
    elif f"update.{name}" in parts and spec.dtype == "float32":
        restored = np.asarray(before + _dequantise(name, spec.shape, parts))
        if name.endswith("running_var"):
            np.maximum(restored, 0, out=restored)  # updates are rounded, variances not negative
    else:
        return before
    if not np.isfinite(restored).all():
        raise DecodeError(f"tensor {name!r} holds NaN or infinity")
    return restored


def _dequantise(name: str, shape: tuple[int, ...], parts: Arrays) -> np.ndarray:
    if len(shape) < 2:
        return _take(parts, f"update.{name}", "float16", shape).astype(np.float32)
    count = math.prod(shape)
    packed = _take(parts, f"update.{name}", "uint8", (-(-count * _BITS // 8),))
    scale = _take(parts, f"scale.{name}", "uint16", shape[:1])
    symbols = _unpack(packed, count).reshape(shape)
    return np.asarray(symbols * _along_channels(_widen(scale), len(shape)))


def _take(parts: Arrays, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    part = parts.pop(name, None)
    if part is None:
        raise DecodeError(f"tensor {name!r} is missing")
    if part.dtype != dtype or part.shape != shape:
        raise DecodeError(
            f"tensor {name!r} is coded as {part.dtype} {list(part.shape)}, not {dtype} "
            f"{list(shape)}"
        )
    return part
