"""Frames that VFL sensors and their head send in every round: arrays, as MessagePack,
one frame a PUBLISH.

Frames are parted so that each fits a packet. Arrays are little-endian float32, row after row; their
shapes follow from the spec and from the number of rows, which the receiver checks.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from broker_config.protocol.codec import DecodeError
from broker_config.protocol.messages import RunId, Seconds, SessionId
from edge_node.extensions.vfl.messages import Period

PART = 256 * 1024  # bytes of arrays in a frame, about
LARGEST_FRAME = 1 << 20  # bytes
Product = Annotated[str, Meta(min_length=1, max_length=64, description="one product")]
Curvature = Annotated[float, Meta(ge=0, le=1e30)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]


class Frame(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of what holds arrays.

    `attempt` grows whenever training goes back to a checkpoint: older ones are void.
    """

    run: RunId
    attempt: Period
    round: Period


class Opened(Frame, frozen=True, kw_only=True):
    """Head -> all: a round opens.

    The set is `first` to `last`; `products` are those from position `since` on.

    A sensor that lacks products before `since` says VflHello again and gets this frame with all of
    them, on `down`.
    """

    first: Count
    last: Count  # past the end
    since: Count
    products: Annotated[tuple[Product, ...], Meta(max_length=10_000)]
    part: Count = 0  # of `products`
    parts: Annotated[int, Meta(ge=1, le=10_000)] = 1


class Embeddings(Frame, frozen=True, kw_only=True):
    """Sensor -> head: h~_k of a round's set, or a part of it: rows [row, row + n)."""

    session: SessionId
    row: Count
    received: bytes  # float32 [n, D_k], as the channel leaves it
    second: bytes = b""  # the other copy that the denoiser learns from: as many, or none
    # rows of this part that it has no sample of
    missing: Annotated[tuple[Count, ...], Meta(max_length=100_000)] = ()
    part: Count = 0
    parts: Annotated[int, Meta(ge=1, le=10_000)] = 1
    collection: Seconds = 0.0  # until its samples were there
    embedding: Seconds = 0.0  # to embed them
    iteration: Seconds = 0.0  # one local iteration, as measured in its last round; 0: not yet


class Represented(Frame, frozen=True, kw_only=True):
    """Head -> all (`labels` shared): Phi (eq.

    4), or a part of it, and how many local iterations each sensor takes.
    """

    row: Count
    head: bytes = b""  # float32: weight [C, sum of D_k], then bias [C]; in part 0
    # of each sensor [n, D_k], denoised
    embeddings: Annotated[tuple[bytes, ...], Meta(max_length=64)]
    labels: bytes  # uint16 [n]
    # E_{t,k}, in the order of sensors; 0: has no product
    iterations: Annotated[tuple[Count, ...], Meta(max_length=64)]
    part: Count = 0
    parts: Annotated[int, Meta(ge=1, le=10_000)] = 1


class Graded(Frame, frozen=True, kw_only=True):
    """Head -> one sensor (`labels` server): the gradient of each product's loss at its
    embedding, or a part of it.
    """

    row: Count
    gradient: bytes  # float32 [n, D_k]
    curvature: Curvature  # of a product's loss along the embedding, at most
    iterations: Count
    part: Count = 0
    parts: Annotated[int, Meta(ge=1, le=10_000)] = 1


class Embedded(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Sensor's service -> head's service: one product's embedding, as the channel leaves it."""

    run: RunId
    round: Period  # of the model that made it
    product: Product
    embedding: bytes  # float32 [D_k]


AnyFrame = Opened | Embeddings | Represented | Graded | Embedded
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


def encode_frame(frame: AnyFrame) -> bytes:
    """The frame as it travels."""
    return _ENCODER.encode(frame)


def decode_frame(payload: bytes) -> AnyFrame:
    """The frame in `payload`, its fields validated but not its arrays' lengths;
    DecodeError if it is none.
    """
    if len(payload) > LARGEST_FRAME:
        raise DecodeError(f"longer than the {LARGEST_FRAME} bytes of a frame")
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(str(error)) from None
