"""Noise on the way from a sensor to the head: what a wireless link does to an embedding (paper VII-E)."""

import numpy as np
from msgspec import ValidationError, convert
from numpy.typing import NDArray

from broker_config.errors import UsageError
from broker_config.vertical import Channel

Array = NDArray[np.float32]
Doubles = NDArray[np.float64]


def passed(channel: Channel, embedding: Array, random: np.random.Generator) -> Array:
    """What arrives of an embedding [N, D]. The quantiser's ranges are the message's own, one for each of D numbers."""
    received = embedding.astype(np.float64)
    if channel.levels:
        received = quantised(received, channel.levels, random.random(embedding.shape) if channel.dither else 0.5)
    if channel.sigma:
        received = received + random.normal(0, channel.sigma * embedding.std(dtype=np.float64), embedding.shape)
    if channel.loss:
        received = received * (random.random((len(embedding), 1)) >= channel.loss)
    return received.astype(np.float32)


def quantised(values: Doubles, levels: int, dither: Doubles | float = 0.5) -> Doubles:
    """One of so many levels, evenly spread from the least to the largest of the (finite) values of a column.

    With a dither of 0.5 that is the nearest level. With one drawn from [0, 1) for each value it is the level below or
    above, by chance, such that the value is what comes out in the mean (non-subtractive dither).

    A range for the whole message would hang on its one extreme product.
    """
    if not len(values):
        return values
    low, high = values.min(0), values.max(0)
    wide = low < high
    grid = np.linspace(low, high, levels)  # [levels, D]
    below = (values - low) * ((levels - 1) / np.where(wide, high - low, 1))
    index = np.minimum((below + dither).astype(np.int64), levels - 1)
    return np.where(wide, np.take_along_axis(grid, index, 0), values)


def parse(text: str) -> Channel:
    """A channel as people write it: `clean`, or `levels=3`, `dither`, `sigma=0.5`, `loss=0.1`, joined by commas.

    Raises:
        UsageError: it is none of these.
    """
    if text == "clean":
        return Channel()
    wrong = UsageError(
        f"the noise {text!r} cannot be read",
        "write clean, or for example levels=3, levels=3,dither, sigma=0.5 or loss=0.1,sigma=0.2",
    )
    given = {name: value or "true" for name, _, value in (part.partition("=") for part in text.split(","))}
    try:
        channel = convert(given, Channel, strict=False)
    except ValidationError:
        raise wrong from None
    if given.keys() - set(Channel.__struct_fields__) or channel.levels == 1 or channel.dither > channel.levels:
        raise wrong
    return channel
