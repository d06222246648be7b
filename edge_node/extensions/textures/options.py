"""Options of FedTFI."""

from typing import Annotated, Literal

import msgspec

from trainer.privacy.patch_protection import Protection

Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Options(Protection, frozen=True):
    """Options of `fedtfi`, with those that protect what a node shows."""

    epochs: Annotated[int, msgspec.Meta(ge=0)] = 0  # a round; 0 = the spec's local_epochs
    # side of a patch on the maps, alpha H; TEL's patches have 2
    mask: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    channels: Positive = 32  # p, of each sample's maps that are interpolated
    swaps: Positive = 16  # cells of each of those channels
    quota: Positive = 64  # patches that a node sends a round
    capacity: Positive = 512  # of the bank
    margin: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0  # m
    # of the triplet loss
    lam: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = msgspec.field(default=0.1, name="lambda")
    # triplet: eq. (13), whose negative is the image with patches of another label. samples: eq.
    # (13), whose negative is another image, of another label; the paper allows both. mixed:
    # interpolation alone, the cross-entropy of positives instead of that of anchors.
    use: Literal["triplet", "samples", "mixed"] = "triplet"
