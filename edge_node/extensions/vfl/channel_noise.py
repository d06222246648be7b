"""Simulated noise on the way from a sensor to the head, as of a wireless link (paper VII-E)."""

from typing import NamedTuple

import numpy as np
from msgspec import ValidationError, convert
from numpy.typing import NDArray

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl.messages import Channel
from trainer.privacy.noise import quantise

Array = NDArray[np.float32]
Doubles = NDArray[np.float64]


class Extent(NamedTuple):
    """The range that noise is relative to: of a sensor's newest round,
    since one product alone has no range.
    """

    low: Doubles  # [D]
    high: Doubles  # [D]
    deviation: float


def measure_extent(embedding: Array) -> Extent:
    """Of the embeddings [N, D] of a round; N is 1 or more."""
    values = embedding.astype(np.float64)
    return Extent(values.min(0), values.max(0), float(values.std()))


def transmit(
    channel: Channel, embedding: Array, random: np.random.Generator, measure: Extent
) -> Array:
    """The embedding [N, D] as it arrives."""
    if not (channel.levels or channel.sigma or channel.loss):
        return embedding
    received = embedding.astype(np.float64)
    if channel.levels:
        dither = random.random(embedding.shape) if channel.dither else 0.5
        received = quantise(received, channel.levels, measure.low, measure.high, dither)
    if channel.sigma:
        received = received + random.normal(0, channel.sigma * measure.deviation, embedding.shape)
    if channel.loss:
        received = received * (random.random((len(embedding), 1)) >= channel.loss)
    return received.astype(np.float32)


def parse_channel(text: str) -> Channel:
    """A channel as people write it: `clean`, or `levels=3`, `dither`, `sigma=0.5`,
    `loss=0.1`, joined by commas.

    Raises:
        UsageError: it is none of these.
    """
    if text == "clean":
        return Channel()
    wrong = UsageError(
        f"the noise {text!r} cannot be read",
        "write clean, or for example levels=3, levels=3,dither, sigma=0.5 or loss=0.1,sigma=0.2",
    )
    pairs = (part.partition("=") for part in text.split(","))
    given = {name: value or "true" for name, _, value in pairs}
    try:
        channel = convert(given, Channel, strict=False)
    except ValidationError:
        raise wrong from None
    if (
        given.keys() - set(Channel.__struct_fields__)
        or channel.levels == 1
        or channel.dither > channel.levels
    ):
        raise wrong
    return channel
