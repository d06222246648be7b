"""Patch feature interpolation (FedTFI, section 3.1): patches cut from a node's maps,
and other nodes' patches put in.

Maps are what an encoder's part `project` makes of the stem's, [n, C, h, w]. They have a grid of m x
m cells, m being the side of a patch; a patch [C, m, m] holds one cell of each channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_node.extensions.textures import patch_bank
from trainer.models.named_tensors import Arrays
from trainer.privacy.patch_protection import draw_mixtures, measure_channels, protect

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from edge_node.extensions.textures.options import Options
    from trainer.data.training_set import TrainingSet
    from trainer.models.network import Network, Tensors


def make_patches(
    network: Network,
    received: Tensors,
    data: TrainingSet,
    random: np.random.Generator,
    options: Options,
) -> Arrays:
    """What a node sends: `quota` patches from maps of the received encoder,
    or none where no label is to be shown.
    """
    labels = data.labels.cpu().numpy()
    rows = draw_mixtures(labels, options.quota, options.mix, random)
    values = np.zeros(
        (options.quota, len(received["encoder.project.weight"]), options.mask, options.mask),
        np.float32,
    )
    shown = np.full(options.quota, -1, np.float32)
    if len(rows):
        images, places = np.unique(rows, return_inverse=True)
        maps = _maps_of(network, received, data, images)
        cells = cut(maps, places.ravel(), options.mask, random)
        sent = protect(
            cells.reshape(*rows.shape, *cells.shape[1:]), measure_channels(maps), options, random
        )
        values[:] = sent.clip(-patch_bank.MAX_VALUE, patch_bank.MAX_VALUE)
        shown[:] = labels[rows[:, 0]]
    return {patch_bank.VALUES: values, patch_bank.LABELS: shown}


def _maps_of(
    network: Network, received: Tensors, data: TrainingSet, images: np.ndarray
) -> np.ndarray:
    """Maps [n, C, h, w] of some images, as the received encoder sees them."""
    import torch  # noqa: PLC0415  (the coordinator has none)

    with torch.no_grad():
        seen = data.encoder_input(
            network, received, torch.from_numpy(images).to(data.labels.device)
        )
        maps: np.ndarray = network.part("project", received, seen).cpu().numpy()
    return maps


def cut(maps: np.ndarray, images: np.ndarray, side: int, random: np.random.Generator) -> np.ndarray:
    """Patches [k, C, side, side] of these images [k] of maps [n, C, h, w]:
    in each channel a cell of its own.
    """
    _, channels, high, wide = maps.shape
    cells = random.integers((high // side) * (wide // side), size=(len(images), channels))
    down = (cells // (wide // side)) * side
    right = (cells % (wide // side)) * side
    rows = down[..., None, None] + np.arange(side)[:, None]
    columns = right[..., None, None] + np.arange(side)
    found: np.ndarray = maps[
        images[:, None, None, None], np.arange(channels)[:, None, None], rows, columns
    ]
    return found


class Cells(NamedTuple):
    """Where patches go: p channels of each of b samples,
    and k different cells in each of those channels.
    """

    channels: Tensor  # int64 [b, p]
    places: Tensor  # int64 [b, p, k], row by row on the grid

    @staticmethod
    def draw(maps: Tensor, side: int, channels: int, swaps: int, random: Generator) -> Cells:
        """For maps [b, C, h, w]; of a grid with fewer than `swaps` cells, all."""
        import torch  # noqa: PLC0415  (the coordinator has none)

        count, most, high, wide = maps.shape
        grid = (high // side) * (wide // side)
        channel = torch.rand((count, most), generator=random).topk(channels).indices
        place = torch.rand((count, channels, grid), generator=random).topk(min(swaps, grid)).indices
        return Cells(channel.to(maps.device), place.to(maps.device))


class Items(NamedTuple):
    """Which patches of a bank go there, for each of b samples, and whether there are any."""

    places: Tensor  # int64, [b, p, k], of the bank
    there: Tensor  # bool [b]

    @staticmethod
    def draw(labels: Tensor, of: Tensor, cells: Cells, random: Generator, *, same: bool) -> Items:
        """For samples of these labels [b]: patches of the `same` label, or of another one,
        from a bank's `of` [n].
        """
        import torch  # noqa: PLC0415  (the coordinator has none)

        by_label = of.argsort(stable=True)  # empty places, -1, come first
        kinds = of[by_label]
        first = torch.searchsorted(kinds, torch.zeros_like(of[:1]))
        start, stop = (
            torch.searchsorted(kinds, labels.to(of), right=right) for right in (False, True)
        )
        count = stop - start if same else len(of) - first - (stop - start)
        chance = torch.rand(cells.places.shape, generator=random).to(of.device)
        nth = (chance * count[:, None, None]).long()
        # a product may be rounded up
        nth = torch.minimum(nth, (count - 1)[:, None, None]).clamp(min=0)
        if same:
            found = start[:, None, None] + nth
        else:
            found = first + nth
            found = torch.where(
                found >= start[:, None, None], found + (stop - start)[:, None, None], found
            )
        return Items(by_label[found.clamp(max=len(of) - 1)], count > 0)


def interpolate(maps: Tensor, patches: Tensor, items: Items, cells: Cells) -> Tensor:
    """Eq. (1): maps [b, C, h, w] whose `cells` hold the same channel of the `items` of patches
    [n, C, m, m].
    """
    import torch  # noqa: PLC0415  (the coordinator has none)

    _, _, high, wide = maps.shape
    side = patches.shape[-1]
    across = wide // side
    corners = (cells.places // across) * side * wide + (cells.places % across) * side
    inside = torch.arange(side, device=maps.device)
    pixels = corners[..., None] + (inside[:, None] * wide + inside).flatten()
    pixels = pixels + (cells.channels * high * wide)[..., None, None]
    values = patches.flatten(2)[items.places, cells.channels[..., None]]
    return maps.flatten(1).scatter(1, pixels.flatten(1), values.flatten(1)).view_as(maps)
