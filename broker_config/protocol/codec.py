"""Encoding of messages and tensors.

Input is checked for size, type and values before use. Never pickle.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np
import zstandard
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from broker_config.protocol import retired_fields
from broker_config.protocol.errors import EdgeNodeError, abbreviate
from broker_config.protocol.federation_kinds import kind_of, kinds_by_message
from broker_config.protocol.messages import (
    AnyMessage,
    MaskingAnswer,
    MaskingStep,
    Message,
    TensorSpec,
)

MAX_MESSAGE = 100 * 1024  # bytes
# begins a signed message (`signing`); neither JSON nor safetensors begin so
ENVELOPE_MARK = b"\x01"
# bytes of a signed message before its content: ENVELOPE_MARK and the signature
ENVELOPE_HEADER = 1 + 64
ENCRYPTED_MARK = b"\x03"  # begins an encrypted message (`message_encryption`)
COMPRESSED_MARK = zstandard.FRAME_HEADER  # begins a compressed message, or blob
ENCRYPTION_OVERHEAD = 64  # bytes by which an encrypted message is longer than the message, at most
M = TypeVar("M", bound=Message)
_INDEX_BYTES = 4  # of a chunk
_HEADER_DTYPES = {
    "float32": "F32",
    "int64": "I64",
    "uint32": "U32",
}  # what a TensorSpec may name, as safetensors writes it
# keys and shares of many nodes: hexadecimal, twice as long as their bytes
_COMPRESSED = (MaskingStep, MaskingAnswer)


class _Kind(msgspec.Struct):
    """Fields of every message."""

    type: str


class DecodeError(ValueError):
    """Bytes that cannot be decoded; the text says briefly why."""

    def __init__(self, why: str):
        super().__init__(abbreviate(why))


def encode(message: Message) -> bytes:
    """Return the message as JSON of at most MAX_MESSAGE bytes, some compressed;
    EdgeNodeError if it needs more.
    """
    payload = msgspec.json.encode(message)
    if len(payload) > MAX_MESSAGE:
        raise EdgeNodeError(
            f"a {type(message).__name__} of {len(payload)} bytes exceeds a message's {MAX_MESSAGE}",
            "take fewer classes, or shorter names",
        )
    # no level finds more
    return zstandard.compress(payload, level=1) if isinstance(message, _COMPRESSED) else payload


def decode(payload: bytes, expect: type[M]) -> M:
    """Return the message in `payload`, which must be an `expect`;
    DecodeError says why it is not.
    """
    message = _decode(payload)
    if not isinstance(message, expect):
        raise DecodeError(f"a {type(message).__name__}, not a {expect.__name__}")
    return message


def decode_any(payload: bytes) -> AnyMessage:
    """Return the message in `payload`, of whichever type a federation of the kernel's own kind
    has; DecodeError if it is none.
    """
    message = _decode(payload)
    if not isinstance(message, AnyMessage):
        raise DecodeError(
            f"a {type(message).__name__}, which belongs to federations of the kind "
            f"{kind_of(message)!r}"
        )
    return message


@cache
def _decoder() -> msgspec.json.Decoder[Message]:
    """Return the decoder of all messages, those of further kinds of federation included."""
    return msgspec.json.Decoder(reduce(or_, kinds_by_message(), AnyMessage))


def _decode(payload: bytes) -> Message:
    if len(payload) > MAX_MESSAGE:
        raise DecodeError(f"longer than the {MAX_MESSAGE} bytes of a message")
    if payload.startswith(ENVELOPE_MARK):
        raise DecodeError("it is signed; to read it, take part with a kit (--kit)")
    if payload.startswith(COMPRESSED_MARK):
        payload = decompress(payload, MAX_MESSAGE)
    try:
        message = _decoder().decode(payload)
        fault = retired_fields.find_fault(type(message).__name__, payload)
    except msgspec.ValidationError as error:
        fault = _find_retired_value(payload)
        if not fault:
            raise DecodeError(_find_unknown_type(payload) or str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(str(error)) from None
    if fault:
        raise DecodeError(f"{fault}; {retired_fields.REMEDY}")
    return message


def _find_retired_value(payload: bytes) -> str:
    try:
        return retired_fields.find_value(payload)
    # behind what the decoder has stumbled over
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def _find_unknown_type(payload: bytes) -> str:
    try:
        found = msgspec.json.decode(payload, type=_Kind).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    known = (*get_args(AnyMessage), *kinds_by_message())
    if found in (each.__name__ for each in known):
        return ""
    return (
        f"a {found!r}, which is no message of this edge-node: install the package that brings it, "
        "or the version that has sent it"
    )


def decompress(frame: bytes, most: int) -> bytes:
    """Return what a zstd frame holds; DecodeError unless it says that these are at most `most`
    bytes, and they are.
    """
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= most:
            raise DecodeError(f"its frame promises {size} bytes; {most} are the most")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DecodeError(f"not a zstd frame: {error}") from None


def encode_tensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return such tensors as safetensors without metadata;
    the bytes depend on names and values only.
    """
    for name, array in tensors.items():
        if array.dtype.name not in _HEADER_DTYPES:
            raise TypeError(f"tensors are float32, int64 or uint32, and {name!r} is {array.dtype}")
    data: bytes = save({name: np.asarray(array, order="C") for name, array in tensors.items()})
    return data


def read_tensors(
    path: Path, expected: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a safetensors file in the order of their names.

    DecodeError before the first one if there are others than `expected`, or of another type or
    shape; later if a tensor holds NaN or infinity.
    """
    if path.stat().st_size > encoded_size(expected):
        raise DecodeError("the file is larger than its tensors")
    try:
        with safe_open(path, framework="np") as file:
            _check_header(file, expected)
        tensors = load_file(path)  # all at once takes less than half as long as one after the other
        for name in sorted(expected):
            if not np.isfinite(tensors[name]).all():
                raise DecodeError(f"tensor {name!r} holds NaN or infinity")
            yield name, tensors[name]
    except SafetensorError as error:
        raise DecodeError(f"not a safetensors file: {error}") from None


class Rows(NamedTuple):
    """Some rows of a tensor, along its first axis. A scalar is one row."""

    tensor: str
    start: int
    stop: int


def read_rows(path: Path, parts: Sequence[Rows]) -> np.ndarray:
    """Return these rows of a file that `read_tensors` has gone through, as one vector;
    nothing else is read.
    """
    with safe_open(path, framework="np") as file:
        slices = [(file.get_slice(name), start, stop) for name, start, stop in parts]
        flat_parts = []
        for each, start, stop in slices:
            shape = each[start:stop] if each.get_shape() else each[...]
            flat_parts.append(np.ravel(shape))
        return np.concatenate(flat_parts)


def _check_header(file: Any, expected: Mapping[str, TensorSpec]) -> None:
    if file.metadata():
        raise DecodeError("__metadata__ is not empty")
    names = set(file.keys())
    if missing := sorted(expected.keys() - names):
        raise DecodeError(f"{len(missing)} tensors are missing, the first is {missing[0]!r}")
    if surplus := sorted(names - expected.keys()):
        raise DecodeError(f"{len(surplus)} tensors too many, the first is {surplus[0]!r}")
    for name, spec in expected.items():
        header = file.get_slice(name)
        if header.get_dtype() != (dtype := _HEADER_DTYPES[spec.dtype]):
            raise DecodeError(f"tensor {name!r} is {header.get_dtype()}, not {dtype}")
        if tuple(header.get_shape()) != spec.shape:
            raise DecodeError(
                f"tensor {name!r} has shape {tuple(header.get_shape())}, not {spec.shape}"
            )


def encoded_size(expected: Mapping[str, TensorSpec]) -> int:
    """Return an upper bound, in bytes, of `encode_tensors` for such tensors:
    what a manifest may promise at most.
    """
    return (
        8 + 8 + sum(_encoded_size(name, spec.dtype, spec.shape) for name, spec in expected.items())
    )


@lru_cache(maxsize=4096)  # asked for each file that is read
def _encoded_size(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one tensor and of its entry in the header, at most."""
    entry = len('"":{"dtype":"F32","shape":[],"data_offsets":[,]},') + 2 * 20
    return (
        len(json.dumps(name))
        + len(str(shape))
        + entry
        + np.dtype(dtype).itemsize * math.prod(shape)
    )


def encode_chunk(index: int, data: bytes | memoryview) -> bytes:
    """Return a chunk as it travels: its index as 4 bytes, big-endian, then its data."""
    return b"".join((index.to_bytes(_INDEX_BYTES, "big"), data))


def decode_chunk(payload: bytes) -> tuple[int, memoryview]:
    """Return index and data of a chunk; the data is a view into `payload`."""
    if len(payload) < _INDEX_BYTES:
        raise DecodeError(f"a chunk of {len(payload)} bytes has no index")
    return int.from_bytes(payload[:_INDEX_BYTES], "big"), memoryview(payload)[_INDEX_BYTES:]
