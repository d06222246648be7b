"""Messages of a line's HTTP interface, as types, of which the OpenAPI document is made."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from edge.bundle.comparison import Comparison
from edge.uncertainty.model_warnings import ModelWarning
from edge.uncertainty.performance import Performance

Count = Annotated[int, Meta(ge=0)]
Weight = Annotated[float, Meta(gt=0)]


class AboutLine(TypedDict):
    """What a line serves."""

    bundle: Annotated[str, Meta(description="NODE@ROUND, +REFITS")]
    digest: str
    federation: str
    method: str
    classes: Sequence[str]
    untaught: Annotated[
        Sequence[str], Meta(description="Those of the classes that this plant never taught")
    ]
    prior: Annotated[
        Mapping[str, Weight],
        Meta(description="Weight of each class, by which verdicts' probabilities are multiplied"),
    ]
    model: Annotated[str, Meta(description="Path of its metadata")]
    classify: str
    comparison: Annotated[
        Comparison | None,
        Meta(description="With training alone, when the model was trained; null if unmeasured"),
    ]
    performance: Annotated[
        Performance | None,
        Meta(description="On held-out images, under the line's view and prior; null without any"),
    ]
    verified: Annotated[bool, Meta(description="Whether signatures are checked")]
    expires: Mapping[Literal["bundle", "charter"], datetime]
    warnings: Sequence[ModelWarning]


class ServerMetadata(TypedDict):
    """The server, as the Open Inference Protocol has it."""

    name: Literal["edge-node"]
    version: str
    extensions: Sequence[str]


class Live(TypedDict):
    """Whether the server answers."""

    live: bool


class Ready(TypedDict):
    """Whether images are taken."""

    ready: bool
    name: NotRequired[str]


class TensorMetadata(TypedDict):
    """An input or output of a model."""

    name: str
    datatype: str
    shape: Annotated[Sequence[int], Meta(description="-1 is any number")]


class ModelMetadata(TypedDict):
    """A model's inputs and outputs."""

    name: str
    versions: Sequence[str]
    platform: str
    inputs: Sequence[TensorMetadata]
    outputs: Sequence[TensorMetadata]


class RequestParameters(TypedDict, total=False):
    """Parameters of an inference request."""

    binary_data_output: bool


class InputParameters(TypedDict, total=False):
    """Parameters of an input."""

    binary_data_size: Count


class OutputParameters(TypedDict, total=False):
    """Parameters of an output."""

    binary_data: bool
    classification: Count


class InputMessage(TypedDict):
    """Images."""

    name: Literal["image"]
    datatype: Literal["UINT8", "BYTES"]
    shape: Annotated[Sequence[Count], Meta(description="[N, size, size, 3], or [N] image files")]
    parameters: NotRequired[InputParameters]
    data: NotRequired[
        Annotated[
            Sequence[Any],
            Meta(description="Pixels, flat or nested as the shape; or image files as Base64"),
        ]
    ]


class OutputMessage(TypedDict):
    """An output that is asked for."""

    name: str
    parameters: NotRequired[OutputParameters]


class InferenceQuestion(TypedDict):
    """An inference request."""

    inputs: Annotated[Sequence[InputMessage], Meta(min_length=1, max_length=1)]
    id: NotRequired[Annotated[str, Meta(description="Comes back in the answer")]]
    parameters: NotRequired[RequestParameters]
    outputs: NotRequired[Annotated[Sequence[OutputMessage], Meta(description="None: all")]]


class AnsweredTensor(TypedDict):
    """An output."""

    name: str
    datatype: Literal["FP32", "BYTES"]
    shape: Sequence[int]
    parameters: NotRequired[Mapping[str, int]]
    data: NotRequired[Sequence[Any]]


class Answering(TypedDict):
    """What has answered."""

    bundle: str
    model: str


class InferenceAnswer(TypedDict):
    """An inference response."""

    model_name: str
    model_version: str
    parameters: Answering
    outputs: Sequence[AnsweredTensor]
    id: NotRequired[str]
