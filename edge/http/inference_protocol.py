"""Inference requests of the Open Inference Protocol (v2), with its binary tensors:
bytes -> images, outputs -> bytes.

https://github.com/kserve/open-inference-protocol; the binary tensors, compression and
`classification` are Triton's extensions.
"""

import base64
import binascii
import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from edge.bundle.bundle_format import Manifest
from edge.http.web_messages import ModelMetadata
from edge.inference.predictor import Outputs
from edge.inference.served_model import Model

MAX_IMAGES = 1024  # of a request
MAX_WRITTEN = 1 << 22  # values of a response as JSON, which take some 20 bytes each
PIECE = 1 << 13  # values written at once, which takes about a millisecond
_OUTPUTS = 1 << 16  # bytes of JSON that name the outputs

_Pixel = Annotated[int, Meta(ge=0, le=255)]
_FLAT = msgspec.json.Decoder(list[_Pixel])
_NESTED = msgspec.json.Decoder(list[list[list[list[_Pixel]]]])
_STRINGS = msgspec.json.Decoder(list[str])


class InvalidRequestError(ValueError):
    """A request that is not an inference request, or not one for this model; says why."""


class _Parameters(Struct):
    binary_data_size: Annotated[int, Meta(ge=0)] | None = None  # of an input
    binary_data: bool | None = None  # of an output
    classification: Annotated[int, Meta(ge=0)] = 0  # of an output: number of the likeliest classes
    binary_data_output: bool = False  # of the request: of outputs that say nothing themselves


class _Input(Struct):
    name: str
    datatype: str
    shape: list[Annotated[int, Meta(ge=0)]]
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)
    data: msgspec.Raw = msgspec.Raw()


class _Output(Struct):
    name: str
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


class _RequestJson(Struct):
    inputs: tuple[_Input]  # of a list, millions would be decoded before they are counted
    id: str = ""
    outputs: msgspec.Raw = msgspec.Raw(b"[]")
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


_REQUEST = msgspec.json.Decoder(_RequestJson)
_OUTPUT_LIST = msgspec.json.Decoder(list[_Output])


class RequestedOutput(NamedTuple):
    """An output that was requested."""

    name: str
    binary: bool
    classes: int  # number of the likeliest instead of all values, unless 0


class InferenceRequest(NamedTuple):
    """A parsed request, with `images`, uint8 [N, size, size, 3], or image files."""

    id: str
    images: NDArray[np.uint8] | None
    files: tuple[bytes, ...]
    outputs: tuple[RequestedOutput, ...]

    @property
    def image_count(self) -> int:
        """Number of images."""
        return len(self.files) if self.images is None else len(self.images)


def metadata(model: Model) -> ModelMetadata:
    """The model's inputs and outputs; -1 is any number, or one that only the graph knows."""
    manifest = model.manifest
    size = manifest.input.size
    encoders = len(manifest.encoders) or -1
    classes = len(manifest.classes)
    shapes = {
        manifest.output: [-1, classes],
        "opinions": [-1, encoders, classes],
        "features": [-1, -1],
        "maps": [-1, encoders, classes, -1, -1],
    }
    return {
        "name": manifest.node,
        "versions": [version(model)],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": manifest.input.name, "datatype": "UINT8", "shape": [-1, size, size, 3]}
        ],
        "outputs": [
            {"name": name, "datatype": "FP32", "shape": shapes[name]}
            for name in output_names(manifest)
        ],
    }


def concatenate(parts: Sequence[Outputs]) -> Outputs:
    """The outputs of several batches as one."""
    filled_columns = []
    for column in zip(*parts, strict=True):
        filled_columns.append([each for each in column if each is not None])
    first, *others = filled_columns
    columns = []
    for each in others:
        column_or_none = np.concatenate(each) if each else None
        columns.append(column_or_none)
    return Outputs(np.concatenate(first), *columns)


def output_names(manifest: Manifest) -> tuple[str, ...]:
    """Names of the model's outputs, the probabilities first."""
    return (manifest.output, *manifest.extras)


def parse(body: bytes, header: int | None, manifest: Manifest) -> InferenceRequest:
    """Parse a request whose JSON takes `header` bytes (None: all);
    InvalidRequestError when it does not fit.
    """
    if header is not None and header > len(body):
        raise InvalidRequestError(f"its header has {header} bytes, the whole body {len(body)}")
    end = len(body) if header is None else header
    try:
        asked = _REQUEST.decode(memoryview(body)[:end])
        if len(memoryview(asked.outputs)) > _OUTPUTS:
            raise InvalidRequestError(
                f"it takes more than {_OUTPUTS >> 10} KiB to name its outputs"
            )
        outputs = _OUTPUT_LIST.decode(asked.outputs)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"its JSON does not fit: {error}") from error
    (tensor,) = asked.inputs
    if tensor.name != manifest.input.name:
        raise InvalidRequestError(f"the model has one input, {manifest.input.name}")
    if tensor.shape and tensor.shape[0] > MAX_IMAGES:
        raise InvalidRequestError(f"it has {tensor.shape[0]} images, more than {MAX_IMAGES}")
    binary = _binary_part(tensor, memoryview(body)[end:])
    wanted = _parse_outputs(outputs, manifest, by_default=asked.parameters.binary_data_output)
    if tensor.datatype == "BYTES":
        return InferenceRequest(asked.id, None, _parse_files(tensor, binary), wanted)
    return InferenceRequest(
        asked.id, _parse_images(tensor, binary, manifest.input.size), (), wanted
    )


def _binary_part(tensor: _Input, rest: memoryview) -> memoryview | None:
    """The bytes behind the JSON, which are all of the one input;
    None when its data stands in the JSON.
    """
    size = tensor.parameters.binary_data_size
    if (size is None) != bool(memoryview(tensor.data)):
        raise InvalidRequestError("an input has either data or binary_data_size")
    if (size or 0) != len(rest):
        raise InvalidRequestError(
            f"{len(rest)} bytes follow its header, binary_data_size says {size or 0}"
        )
    return None if size is None else rest


def _parse_images(tensor: _Input, binary: memoryview | None, size: int) -> NDArray[np.uint8]:
    """uint8 [N, size, size, 3], which shares memory with `binary`."""
    shape = tensor.shape
    if tensor.datatype != "UINT8" or shape[1:] != [size, size, 3] or not shape[0]:
        raise InvalidRequestError(
            f"the model takes UINT8 [N, {size}, {size}, 3], or BYTES [N] of image files"
        )
    expected = math.prod(shape)
    if binary is not None:
        if len(binary) != expected:
            raise InvalidRequestError(
                f"its binary data has {len(binary)} bytes, its shape {expected} values"
            )
        return np.frombuffer(binary, np.uint8).reshape(shape)
    raw = memoryview(tensor.data).tobytes()
    # Before anything is built of it: a tree with so many leaves has as many commas, less one.
    if raw.count(b",") + 1 != expected or raw.count(b"[") not in (
        1,
        1 + shape[0] * (1 + size + size * size),
    ):
        raise InvalidRequestError(
            f"its data are not {expected} values, flat or nested as its shape"
        )
    try:
        form = _FLAT if raw.count(b"[") == 1 else _NESTED
        values: list[Any] = form.decode(raw)
        pixels = np.array(values, np.uint8)
    # numpy's about ragged lists
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InvalidRequestError(f"its data do not fit: {error}") from error
    if pixels.shape not in ((expected,), tuple(shape)):
        raise InvalidRequestError(f"its data are nested as {list(pixels.shape)}")
    return pixels.reshape(shape)


def _parse_files(tensor: _Input, binary: memoryview | None) -> tuple[bytes, ...]:
    """Each file: in binary data a length of four bytes precedes it, in JSON it is Base64."""
    if len(tensor.shape) != 1 or not tensor.shape[0]:
        raise InvalidRequestError("image files are BYTES [N]")
    (count,) = tensor.shape
    files = _split_files(binary, count) if binary is not None else _decode_files(tensor, count)
    if len(files) != count:
        raise InvalidRequestError(f"it holds {len(files)} image files, its shape says {count}")
    return tuple(files)


def _decode_files(tensor: _Input, count: int) -> list[bytes]:
    if memoryview(tensor.data).tobytes().count(b'"') > 2 * count:  # before a string is made of each
        raise InvalidRequestError(f"it holds more than {count} image files")
    try:
        return [base64.b64decode(text, validate=True) for text in _STRINGS.decode(tensor.data)]
    except (msgspec.DecodeError, UnicodeDecodeError, binascii.Error, ValueError) as error:
        raise InvalidRequestError(
            f"in JSON an image file is a string of Base64: {error}"
        ) from error


def _split_files(binary: memoryview, count: int) -> list[bytes]:
    files: list[bytes] = []
    at = 0
    while at < len(binary):
        if len(files) == count:
            raise InvalidRequestError(f"it holds more than {count} image files")
        if at + 4 > len(binary):
            raise InvalidRequestError("its binary data ends within a length")
        (length,) = struct.unpack_from("<I", binary, at)
        at += 4 + length
        if at > len(binary):
            raise InvalidRequestError("its binary data ends within an image file")
        files.append(bytes(binary[at - length : at]))
    return files


def _parse_outputs(
    outputs: list[_Output], manifest: Manifest, *, by_default: bool
) -> tuple[RequestedOutput, ...]:
    names = output_names(manifest)
    if not outputs:
        return tuple(RequestedOutput(name, by_default, 0) for name in names)
    found = []
    for each in outputs:
        if each.name not in names:
            raise InvalidRequestError(f"the model's outputs are {', '.join(names)}")
        if each.parameters.classification and each.name != manifest.output:
            raise InvalidRequestError(f"classification is of {manifest.output} alone")
        binary = by_default if each.parameters.binary_data is None else each.parameters.binary_data
        found.append(
            RequestedOutput(
                each.name, binary, min(each.parameters.classification, len(manifest.classes))
            )
        )
    if len({each.name for each in found}) < len(found):
        raise InvalidRequestError("it asks for an output twice")
    return tuple(found)


class _Tensor(Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] | None = None
    data: msgspec.Raw | None = None


class _ResponseJson(Struct, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: list[_Tensor]
    parameters: dict[str, str]
    id: str = ""


def value_count(inference: InferenceRequest, model: Model, outputs: Outputs) -> int:
    """Return how many values the response has; InvalidRequestError if they are too many."""
    names = [wanted.name for wanted in inference.outputs]
    found = sum(_values(name, model, outputs).size for name in names)
    written = sum(
        _values(wanted.name, model, outputs).size
        for wanted in inference.outputs
        if not (wanted.binary or wanted.classes)
    )
    # outputs may be those of the first images alone
    images = inference.image_count / len(outputs.probabilities)
    if written * images > MAX_WRITTEN:
        raise InvalidRequestError(
            f"its response would have more than {MAX_WRITTEN} values as JSON: ask for binary "
            "data, fewer outputs or fewer images"
        )
    return found


def _values(name: str, model: Model, outputs: Outputs) -> NDArray[np.float32]:
    if name == model.manifest.output:
        return outputs.probabilities
    found: NDArray[np.float32] = getattr(outputs, name)
    return found


def build_response(
    inference: InferenceRequest, model: Model, outputs: Outputs
) -> tuple[bytes, int | None]:
    """The response's bytes, and how many of them are JSON when binary tensors follow."""
    manifest = model.manifest
    tensors = []
    binaries = []
    for wanted in inference.outputs:
        values = _values(wanted.name, model, outputs)
        tensor, binary = _encode_tensor(wanted, values, manifest.classes)
        tensors.append(tensor)
        binaries.append(binary)
    about = {"bundle": manifest.id, "model": model.digest}
    head = msgspec.json.encode(
        _ResponseJson(manifest.node, version(model), tensors, about, inference.id)
    )
    whole = b"".join((head, *binaries))
    header_size = len(head) if any(wanted.binary for wanted in inference.outputs) else None
    return whole, header_size


def version(model: Model) -> str:
    """A model's version, as clients request it: the round."""
    return str(model.manifest.round)


def _encode_tensor(
    wanted: RequestedOutput, values: NDArray[np.float32], classes: Sequence[str]
) -> tuple[_Tensor, bytes]:
    """An output, and its bytes when it is to be binary."""
    if wanted.classes:
        words = list(
            chain.from_iterable(_format_likeliest(row, wanted.classes, classes) for row in values)
        )
        shape = (len(values), wanted.classes)
        datatype = "BYTES"
        binary = b"".join(struct.pack("<I", len(word.encode())) + word.encode() for word in words)
    else:
        shape = values.shape
        datatype = "FP32"
        binary = values.astype("<f4", copy=False).tobytes()
    if wanted.binary:
        return _Tensor(wanted.name, datatype, shape, {"binary_data_size": len(binary)}), binary
    data = _write(words) if wanted.classes else _write(values.ravel())
    return _Tensor(wanted.name, datatype, shape, data=data), b""


def _write(values: list[str] | NDArray[np.float32]) -> msgspec.Raw:
    """Write a list as JSON, in pieces between which other threads have their turn."""
    pieces = []
    for first in range(0, len(values), PIECE):
        piece = values[first : first + PIECE]
        plain = piece if isinstance(piece, list) else piece.tolist()
        pieces.append(msgspec.json.encode(plain)[1:-1])
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def _format_likeliest(row: NDArray[np.float32], count: int, classes: Sequence[str]) -> list[str]:
    """`value:index:label`, the likeliest first."""
    best = np.argsort(-row, kind="stable")[:count].tolist()
    return [f"{row[index]:f}:{index}:{classes[index]}" for index in best]
