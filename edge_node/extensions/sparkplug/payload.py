"""Sparkplug B payloads: Protocol Buffers, package org.eclipse.tahu.protobuf.

The numbers are those of Eclipse Sparkplug 3.0.0, section 6.4. What we neither write nor read
(templates, data sets, property sets) is left out; a parser skips it.
"""

import math
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple, cast

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "org.eclipse.tahu.protobuf"
MAX_BYTES = 1 << 16  # of a payload that is decoded
# characters: a broker that accepts no larger message would end the connection, every time
_MAX_TEXT = 1000
_WRAP = 1 << 64
_METRIC = f".{PACKAGE}.Payload.Metric"

_PAYLOAD_FIELDS = {
    "timestamp": (1, FieldDescriptorProto.TYPE_UINT64),
    "metrics": (2, FieldDescriptorProto.TYPE_MESSAGE),
    "seq": (3, FieldDescriptorProto.TYPE_UINT64),
}
_METRIC_FIELDS = {
    "name": (1, FieldDescriptorProto.TYPE_STRING),
    "alias": (2, FieldDescriptorProto.TYPE_UINT64),
    "timestamp": (3, FieldDescriptorProto.TYPE_UINT64),
    "datatype": (4, FieldDescriptorProto.TYPE_UINT32),
    "is_historical": (5, FieldDescriptorProto.TYPE_BOOL),
    "is_null": (7, FieldDescriptorProto.TYPE_BOOL),
}
_VALUE_FIELDS = {  # one of them
    "int_value": (10, FieldDescriptorProto.TYPE_UINT32),
    "long_value": (11, FieldDescriptorProto.TYPE_UINT64),
    "float_value": (12, FieldDescriptorProto.TYPE_FLOAT),
    "double_value": (13, FieldDescriptorProto.TYPE_DOUBLE),
    "boolean_value": (14, FieldDescriptorProto.TYPE_BOOL),
    "string_value": (15, FieldDescriptorProto.TYPE_STRING),
    "bytes_value": (16, FieldDescriptorProto.TYPE_BYTES),
}

Value = int | float | bool | str | None


class Type(IntEnum):
    """The datatypes of our metrics."""

    INT64 = 4
    DOUBLE = 10
    BOOLEAN = 11
    STRING = 12


class Metric(NamedTuple):
    """One value at one moment.

    A birth gives its name and datatype, later messages its alias alone.
    """

    type: Type
    value: Value
    timestamp: int  # milliseconds since 1970, UTC
    name: str | None = None
    alias: int | None = None
    historical: bool = False


def encode(metrics: Iterable[Metric], timestamp: int, seq: int | None) -> bytes:
    """The payload's bytes; `timestamp` is when it is sent, in milliseconds since 1970,
    `seq` 0..255.

    TypeError for a value that is not of its metric's type. NaN and infinity are sent as null, texts
    are cut to 1000 characters.
    """
    payload = _PAYLOAD(timestamp=timestamp)
    if seq is not None:
        payload.seq = seq
    for metric in metrics:
        _write_metric(payload.metrics.add(), metric)
    return cast(bytes, payload.SerializeToString())


def true_metrics(data: bytes) -> set[str]:
    """The names of the boolean metrics that a command sets to true;
    ValueError when it is not a payload.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes")
    try:
        metrics = _PAYLOAD.FromString(data).metrics
        return {
            each.name for each in metrics if each.HasField("boolean_value") and each.boolean_value
        }
    except DecodeError as error:
        raise ValueError(str(error)) from error


def _write_metric(wire: Any, metric: Metric) -> None:
    wire.timestamp = metric.timestamp
    if metric.alias is not None:
        wire.alias = metric.alias
    if metric.name is not None:
        wire.name = metric.name
        wire.datatype = int(metric.type)
    if metric.historical:
        wire.is_historical = True
    match metric.type, metric.value:
        case _, None:
            wire.is_null = True
        case Type.DOUBLE, int(value) | float(value) if math.isfinite(value):
            wire.double_value = value
        case Type.DOUBLE, float():
            wire.is_null = True
        case Type.INT64, int(value):
            wire.long_value = value % _WRAP  # two's complement
        case Type.BOOLEAN, bool(value):
            wire.boolean_value = value
        case Type.STRING, str(value):
            wire.string_value = (
                value[:_MAX_TEXT].encode(errors="replace").decode()
            )  # file names may hold half characters
        case _:
            raise TypeError(f"{metric.value!r} is no {metric.type.name}")


def _message_class() -> Any:
    """The class of payloads, in a pool of its own: another package may define the same messages."""
    file = FileDescriptorProto(name="sparkplug_b.proto", package=PACKAGE, syntax="proto2")
    payload = file.message_type.add(name="Payload")
    metric = payload.nested_type.add(name="Metric")
    metric.oneof_decl.add(name="value")
    for name, (number, kind) in _PAYLOAD_FIELDS.items():
        repeated = name == "metrics"
        label = (
            FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
        )
        type_name = _METRIC if repeated else None
        payload.field.add(name=name, number=number, type=kind, label=label, type_name=type_name)
    for name, (number, kind) in _METRIC_FIELDS.items():
        metric.field.add(
            name=name, number=number, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL
        )
    for name, (number, kind) in _VALUE_FIELDS.items():
        metric.field.add(
            name=name,
            number=number,
            type=kind,
            label=FieldDescriptorProto.LABEL_OPTIONAL,
            oneof_index=0,
        )
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.Payload"))


_PAYLOAD = _message_class()
