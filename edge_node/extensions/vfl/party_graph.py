"""ONNX graphs of sensors and head, put together node by node:
a run writes them every half minute.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from broker_config.protocol.errors import EdgeNodeError
from edge_node.extensions.vfl.algorithm import Head
from edge_node.extensions.vfl.line.party_bundle import Array
from edge_node.extensions.vfl.line.sensor_rows import Scaling
from edge_node.extensions.vfl.networks import ClipNorm
from export.parity import BATCHES, TOLERANCE, open_session

_OPSET = 20
_IR = 10
_REMEDY = "report it, with the network's name"
_DIVERGED = "train again with a smaller learning rate"
# weights over all patterns of presence; of more, absent embeddings are filled by their means
_EXACT = 1 << 22
_MAX_PATTERNS = 256  # of presence that are compared with torch


Imputation = Callable[[tuple[bool, ...]], tuple[Tensor, Tensor]]
"""For a pattern of presence: matrix [D, D] and offset [D] that fill embeddings,
zeros where a sensor is absent.
"""

Arrays = dict[str, NDArray[Any]]  # arrays by the names of a graph's inputs, or of its outputs too


class Checked(NamedTuple):
    """A graph that computes what torch computes, and values of its inputs and outputs."""

    content: bytes
    golden: Arrays


class VflParityError(EdgeNodeError):
    """A graph does not compute what torch computes: nothing was written."""


class _Builder:
    """An ONNX graph in the making."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._values: list[onnx.TensorProto] = []

    def add(self, kind: str, *inputs: str, **attributes: object) -> str:
        """A node; return the name of its output."""
        name = f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def value(self, array: NDArray[np.generic]) -> str:
        """A constant; return its name."""
        name = f"value_{len(self._values)}"
        self._values.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def call(self, module: nn.Module, source: str) -> str:
        """What a network of plain layers does; return the name of its output."""
        match module:
            case nn.Sequential():
                for layer in module:
                    source = self.call(layer, source)
                return source
            case nn.Linear():
                return self.add("Gemm", source, *self._weights(module), transB=1)
            case nn.Conv1d() | nn.Conv2d():
                strides = list(module.stride)
                pads = [int(each) for each in module.padding]
                return self.add(
                    "Conv", source, *self._weights(module), strides=strides, pads=[*pads, *pads]
                )
            case nn.MaxPool2d():
                side = module.kernel_size
                assert isinstance(side, int)
                return self.add("MaxPool", source, kernel_shape=[side, side], strides=[side, side])
            case nn.ReLU():
                return self.add("Relu", source)
            case ClipNorm():
                length = self.value(np.array([[module.length]], np.float32))
                norm = self.add("ReduceL2", source, self.value(np.array([1], np.int64)), keepdims=1)
                return self.add(
                    "Mul", source, self.add("Div", length, self.add("Max", norm, length))
                )
            case nn.Flatten():
                return self.add("Flatten", source)
        raise VflParityError(f"a layer {type(module).__name__} cannot be exported as ONNX", _REMEDY)

    def _weights(self, layer: nn.Module) -> Iterator[str]:
        yield from (
            self.value(each.detach().numpy())
            for each in (layer.weight, layer.bias)
            if isinstance(each, Tensor)
        )

    def finish(
        self, inputs: Sequence[onnx.ValueInfoProto], outputs: dict[str, str], size: dict[str, int]
    ) -> bytes:
        """The graph; `outputs` are names -> what they are called inside,
        `size` those of [N, size]; others are [N].
        """
        for name, inner in outputs.items():
            self._nodes.append(helper.make_node("Identity", [inner], [name]))
        described = []
        for output in outputs:
            width = [size[output]] if output in size else []
            described.append(
                helper.make_tensor_value_info(output, TensorProto.FLOAT, ["N", *width])
            )
        graph = helper.make_graph(self._nodes, "vfl", inputs, described, self._values)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR
        )
        return bytes(model.SerializeToString())


def build_sensor_graph(
    model: nn.Module, shape: Sequence[int], size: int, scaling: Scaling
) -> Checked:
    """`samples` raw float32 [N, cells, ...] -> `embedding` [N, size]; checked against torch.

    A row's cells are the `shape`'s columns, and settings that are no features behind them, if
    `scaling` has such.

    Raises:
        VflParityError: onnxruntime computes something else.
    """
    build = _Builder()
    cells = max(shape[0], *(1 + scaling.settings).tolist(), 0)
    samples = helper.make_tensor_value_info("samples", TensorProto.FLOAT, ["N", cells, *shape[1:]])
    scaled = _add_scaling(build, scaling, shape)
    content = build.finish([samples], {"embedding": build.call(model, scaled)}, {"embedding": size})

    def expected(given: Arrays) -> list[Array]:
        columns = np.moveaxis(scaling(np.moveaxis(given["samples"], 1, -1)), -1, 1)
        with torch.no_grad():
            embedded: Tensor = model(torch.from_numpy(np.ascontiguousarray(columns)))
        return [embedded.numpy()]

    random = np.random.default_rng(0)
    raw = [_draw_samples(random, scaling, (count, cells, *shape[1:])) for count in BATCHES]
    return Checked(content, _compare(content, [{"samples": each} for each in raw], expected))


def _add_scaling(build: _Builder, scaling: Scaling, shape: Sequence[int]) -> str:
    """What `scaling` does, as nodes; return the name of the output [N, *shape]."""
    if not len(scaling.settings):
        mean, deviation = (
            build.value(each.reshape(-1, *[1] * (len(shape) - 1)))
            for each in (scaling.mean, scaling.deviation)
        )
        return build.add("Div", build.add("Sub", "samples", mean), deviation)
    # [N, S, cycles]
    settings = build.add("Gather", "samples", build.value(scaling.settings), axis=1)
    apart = build.add("Unsqueeze", settings, build.value(np.array([1])))
    # [N, C, S, cycles]
    difference = build.add("Sub", apart, build.value(scaling.conditions[None, :, :, None]))
    distance = build.add(
        "ReduceSum",
        build.add("Mul", difference, difference),
        build.value(np.array([2])),
        keepdims=0,
    )
    which = build.add("ArgMin", distance, axis=1, keepdims=0)  # [N, cycles]
    mean, deviation = (
        build.add(
            "Transpose", build.add("Gather", build.value(each), which, axis=0), perm=[0, 2, 1]
        )
        for each in (scaling.mean, scaling.deviation)
    )
    columns = build.add("Gather", "samples", build.value(np.arange(shape[0])), axis=1)
    return build.add("Div", build.add("Sub", columns, mean), deviation)


def _draw_samples(random: np.random.Generator, scaling: Scaling, shape: Sequence[int]) -> Array:
    """Raw samples [N, cells, ...] as they may come, of all conditions."""
    count, cells, *others = shape
    which = random.integers(len(scaling.conditions), size=(count, *others))
    # [N, ..., columns]
    mean, deviation = (np.atleast_2d(each)[which] for each in (scaling.mean, scaling.deviation))
    rows = np.zeros((count, *others, cells), np.float32)
    rows[..., : mean.shape[-1]] = random.normal(0, 1, mean.shape) * deviation + mean
    rows[..., scaling.settings] = scaling.conditions[which]
    return np.ascontiguousarray(np.moveaxis(rows, -1, 1))


def build_head_graph(
    head: Head, sizes: Sequence[int], fill: Imputation, values: Sequence[float] | None
) -> Checked:
    """`embedding_k` float32 [N, D_k] as received and `present` bool [N,
    K] -> `probabilities` [N, C].

    `fill` says how absent embeddings follow from present ones, denoised. With `values`, a number
    for each class, there is `expectation` [N] besides. VflParityError as above.
    """
    build = _Builder()
    count = len(sizes)
    exact = sum(sizes) * max(sum(sizes), head.model.out_features) << count <= _EXACT
    fill = fill if exact else impute_means(fill((False,) * count)[1], sizes)
    clean = []
    for index in range(count):
        denoised = (
            build.call(denoiser, f"embedding_{index}")
            if (denoiser := head.denoiser.plain_layers(index))
            else f"embedding_{index}"
        )
        clean.append(denoised)
    owners = np.repeat(np.eye(count, dtype=np.float32), sizes, axis=1)  # [K, sum of D_k]
    there = build.add("Cast", "present", to=TensorProto.FLOAT)
    mask = build.add("Cast", build.add("MatMul", there, build.value(owners)), to=TensorProto.BOOL)
    stand_in = np.zeros((1, 1), np.float32) if exact else fill((False,) * count)[1].numpy()[None]
    features = build.add("Where", mask, build.add("Concat", *clean, axis=1), build.value(stand_in))
    logits = (
        _add_logits(build, head.model, features, there, fill, count)
        if exact
        else build.call(head.model, features)
    )
    outputs = {"probabilities": build.add("Softmax", logits, axis=1)}
    if values:
        column = build.value(np.array(values, np.float32)[:, None])
        mean = build.add("MatMul", outputs["probabilities"], column)
        outputs["expectation"] = build.add("Squeeze", mean, build.value(np.array([1], np.int64)))
    inputs = [
        helper.make_tensor_value_info(f"embedding_{index}", TensorProto.FLOAT, ["N", size])
        for index, size in enumerate(sizes)
    ]
    inputs.append(helper.make_tensor_value_info("present", TensorProto.BOOL, ["N", count]))
    content = build.finish(inputs, outputs, {"probabilities": head.model.out_features})

    def expected(given: Arrays) -> list[Array]:
        received = [torch.from_numpy(given[f"embedding_{index}"]) for index in range(count)]
        rows = []
        for row, present in zip(
            torch.cat(head.denoiser(received), 1), given["present"].tolist(), strict=True
        ):
            matrix, offset = fill(tuple(present))
            known = torch.from_numpy(np.repeat(present, sizes))
            rows.append(torch.where(known, row, torch.where(known, row, 0.0) @ matrix + offset))
        probabilities = torch.softmax(head.logits([torch.stack(rows)]), 1).numpy()
        expected_value = [probabilities @ np.array(values, np.float32)] if values else []
        return [probabilities, *expected_value]

    return Checked(content, _compare(content, list(_make_cases(sizes)), expected))


def impute_means(means: Tensor, sizes: Sequence[int]) -> Imputation:
    """In place of each absent embedding its mean."""

    def fill(pattern: tuple[bool, ...]) -> tuple[Tensor, Tensor]:
        known = torch.from_numpy(np.repeat(pattern, sizes))
        return torch.diag(known.float()), torch.where(known, 0.0, means)

    return fill


def _add_logits(
    build: _Builder, head: nn.Linear, known: str, there: str, fill: Imputation, count: int
) -> str:
    """What the head makes of embeddings [N, sum of D_k], zeros where a sensor is absent.

    Filling them is linear, as the head is: so each pattern of presence has a head of its own, and a
    row takes its.
    """
    patterns = list(product([False, True], repeat=count))
    heads = []
    biases = []
    for matrix, offset in map(fill, patterns):
        heads.append(matrix @ head.weight.detach().T)
        biases.append(head(offset).detach())
    every = build.add(
        "Gemm",
        known,
        build.value(torch.cat(heads, 1).numpy()),
        build.value(torch.cat(biases).numpy()),
    )
    shape = np.array([-1, len(patterns), head.out_features], np.int64)
    powers = 2.0 ** np.arange(count - 1, -1, -1, dtype=np.float32)[:, None]
    which = build.add("Cast", build.add("MatMul", there, build.value(powers)), to=TensorProto.INT64)
    return build.add(
        "GatherND", build.add("Reshape", every, build.value(shape)), which, batch_dims=1
    )


def _make_cases(sizes: Sequence[int]) -> Iterator[Arrays]:
    """Inputs of the head: every pattern of presence, in batches of several sizes."""
    random = np.random.default_rng(0)
    patterns = np.array(list(islice(product([True, False], repeat=len(sizes)), _MAX_PATTERNS)))
    for count in (*BATCHES, len(patterns)):
        given: Arrays = {
            f"embedding_{index}": random.normal(0, 1, (count, size)).astype(np.float32)
            for index, size in enumerate(sizes)
        }
        present = patterns if count == len(patterns) else random.random((count, len(sizes))) < 0.5
        yield given | {"present": present}


def _compare(
    content: bytes, cases: Sequence[Arrays], expected: Callable[[Arrays], list[Array]]
) -> Arrays:
    """Inputs and outputs of the last case; VflParityError unless all outputs are those of torch."""
    run = open_session(content)
    names = [each.name for each in run.get_outputs()]
    for given in cases:
        found = run.run(names, given)
        wanted = expected(given)
        for name, one, other in zip(names, found, wanted, strict=True):
            if not np.isfinite(other).all():
                raise VflParityError(
                    f"the trained model gives {name} that are not finite", _DIVERGED
                )
            if one.shape != other.shape or not np.all(
                np.abs(one - other) <= TOLERANCE * max(1, np.abs(other).max())
            ):
                raise VflParityError(f"the ONNX graph gives other {name} than torch", _REMEDY)
    return {**given, **dict(zip(names, wanted, strict=True))}
