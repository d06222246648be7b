"""Protection of patches before they leave a node: mixing of images, Gaussian noise, few levels.

None of it is differential privacy worth the name (docs/security.md has the figures): it only makes
patches less exact. Whoever can reproduce the random numbers can subtract the noise and knows where
the patches were cut. Where others must not, the generator is seeded from a secret of the node's
own.
"""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import UsageError
from trainer.privacy.noise import quantise

Floats = NDArray[np.float32]
RANGE = 3.0  # deviations to each side of the mean that levels are spread over


class Protection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that protect patches; their defaults do not.

    UsageError for a single level, at which all are equal.
    """

    # Gaussian, in standard deviations of the channel
    noise: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    levels: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0  # that a value may have; 0 = as it is
    mix: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # images of one label whose mean a patch is

    def __post_init__(self) -> None:
        if self.levels == 1:
            raise UsageError(
                "patches of one level would all be the same",
                "give levels 2 or more, or 0 for no levels",
            )

    @property
    def active(self) -> str:
        """The protections in force, in the order in which they act, as text;
        empty if there are none.
        """
        mix = self.mix if self.mix > 1 else 0
        given = {"mix": mix, "noise": self.noise, "levels": self.levels}
        return ", ".join(f"{name}={value:g}" for name, value in given.items() if value)

    def unmet_demands(self, demanded: Mapping[str, object]) -> str:
        """The demands of a node that are not met, as text; empty if all are.

        UsageError for invalid demands.
        """
        try:
            wanted = msgspec.convert(dict(demanded), Protection, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"what this node demands cannot be met: {error}",
                "demand noise=S, levels=N or mix=N",
            ) from error
        unmet = {
            f"mix={wanted.mix} or more": self.mix < wanted.mix,
            f"noise={wanted.noise:g} or more": self.noise < wanted.noise,
            f"levels={wanted.levels} or fewer": wanted.levels
            and not 0 < self.levels <= wanted.levels,
        }
        return ", ".join(words for words, is_so in unmet.items() if is_so)


class SentPatches(NamedTuple):
    """How the patches in a node's contribution are made."""

    protection: Protection
    side: int  # of a patch, in cells of the maps
    quota: int  # in a contribution


class ChannelStatistics(NamedTuple):
    """Statistics of each channel of the maps that patches are cut from:
    the units of noise and levels.
    """

    mean: Floats  # [C]
    deviation: Floats  # [C]


def measure_channels(maps: Floats) -> ChannelStatistics:
    """The statistics of a node's maps [n, C, H, W]."""
    return ChannelStatistics(maps.mean((0, 2, 3)), maps.std((0, 2, 3)))


def draw_mixtures(
    labels: NDArray[np.int64], quota: int, mix: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Which images each patch is made of: rows [quota, mix] of positions in `labels`,
    each row of one label.

    A label with fewer than `mix` images is never in a patch; where none has as many there are no
    rows. Labels come in proportion to their images.
    """
    counts = np.bincount(labels, minlength=1)
    enough = np.flatnonzero(counts[labels] >= mix)
    if not len(enough):
        return np.empty((0, mix), np.int64)
    first = random.choice(enough, quota, replace=quota > len(enough))
    rows = [
        random.choice(np.flatnonzero(labels == labels[image]), mix, replace=False)
        for image in first
    ]
    return np.stack(rows) if mix > 1 else first[:, None]


def protect(
    patches: Floats, measure: ChannelStatistics, protection: Protection, random: np.random.Generator
) -> Floats:
    """Patches [n, mix, C, m, m], cut from that many images each, as they leave the node: [n,
    C, m, m].

    Their mean, then noise, then the nearest of the levels; what lies beyond RANGE deviations is
    cut, if there are any.
    """
    sent = patches.mean(1, dtype=np.float64)
    mean, deviation = (each.astype(np.float64)[:, None, None] for each in measure)
    if protection.noise:
        sent = sent + protection.noise * deviation * random.standard_normal(sent.shape)
    if protection.levels:
        sent = quantise(sent, protection.levels, mean - RANGE * deviation, mean + RANGE * deviation)
    return np.asarray(sent, np.float32)
