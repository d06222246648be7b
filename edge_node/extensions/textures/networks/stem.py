"""VGG19 up to its second pooling layer: the frozen stem of all small texture networks."""

from typing import cast

from torch import Tensor, nn

STEM_CHANNELS = 128
"""Channels of its output."""


class Stem(nn.Module):
    """conv1_1 .. conv2_2 with pool1 and pool2 (Simonyan and Zisserman, 2015),
    after a 1 x 1 colour layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.colour = nn.Conv2d(3, 3, 1)
        self.conv1_1 = nn.Conv2d(3, 64, 3, padding=1)
        self.conv1_2 = nn.Conv2d(64, 64, 3, padding=1)
        self.conv2_1 = nn.Conv2d(64, STEM_CHANNELS, 3, padding=1)
        self.conv2_2 = nn.Conv2d(STEM_CHANNELS, STEM_CHANNELS, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        for values in self.parameters():  # random weights that keep the scale of activations
            if values.ndim == 1:
                nn.init.zeros_(values)
            else:
                nn.init.kaiming_normal_(values, nonlinearity="relu")
        nn.init.dirac_(self.colour.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Images [n, 3, S, S] -> maps [n, 128, S/4, S/4]."""
        maps = self.relu(self.conv1_2(self.relu(self.conv1_1(self.colour(images)))))
        maps = self.relu(self.conv2_2(self.relu(self.conv2_1(self.pool(maps)))))
        return cast(Tensor, self.pool(maps))
