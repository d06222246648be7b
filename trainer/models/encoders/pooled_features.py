"""A convolutional stack and global average pooling."""

from typing import cast

from torch import Tensor, nn


class PooledFeatures(nn.Module):
    """The mean of what `features` gives, over height and width."""

    def __init__(self, features: nn.Module):
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        """[n, 3, S, S] -> [n, features]."""
        return cast(Tensor, self.features(images)).mean((2, 3))
