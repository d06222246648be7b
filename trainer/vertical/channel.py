"""Noise on the way from a sensor to the head: what a wireless link does to an embedding (paper VII-E)."""

import numpy as np
from numpy.typing import NDArray

from broker_config.errors import UsageError
from broker_config.vertical import Channel

Array = NDArray[np.float32]


def passed(channel: Channel, embedding: Array, random: np.random.Generator) -> Array:
    """What arrives of an embedding [N, D]. The quantiser's range is the message's own."""
    received: NDArray[np.floating] = quantised(embedding, channel.levels) if channel.levels else embedding
    if channel.sigma:
        received = received + random.normal(0, channel.sigma * embedding.std(), embedding.shape)
    if channel.loss:
        received = received * (random.random((len(embedding), 1)) >= channel.loss)
    return np.asarray(received, np.float32)


def quantised(values: Array, levels: int) -> Array:
    """The nearest of so many levels, evenly spread from the least to the largest of the values."""
    low, high = values.min(initial=np.inf), values.max(initial=-np.inf)
    if not low < high:
        return values
    step = (high - low) / (levels - 1)
    return np.asarray(low + np.round((values - low) / step) * step, np.float32)


def parse(text: str) -> Channel:
    """A channel as people write it: `clean`, or `levels=3`, `sigma=0.5`, `loss=0.1`, joined by commas.

    Raises:
        UsageError: it is none of these.
    """
    if text == "clean":
        return Channel()
    wrong = UsageError(
        f"the noise {text!r} cannot be read", "write clean, or for example levels=3, sigma=0.5 or loss=0.1,sigma=0.2"
    )
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            given[name] = float(value)
        except ValueError:
            raise wrong from None
    levels, sigma, loss = given.pop("levels", 0.0), given.pop("sigma", 0.0), given.pop("loss", 0.0)
    ranges = (levels == 0 or 2 <= levels <= 1 << 16) and levels == int(levels) and sigma >= 0 and 0 <= loss < 1
    if given or not ranges:
        raise wrong
    return Channel(levels=int(levels), sigma=sigma, loss=loss)
