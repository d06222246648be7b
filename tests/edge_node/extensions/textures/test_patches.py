"""FedTFI by hand: which patches a node cuts, and where others' are put."""

import numpy as np
import pytest
import torch

from edge_node.extensions.textures.patches import Cells, Items, cut, interpolate

SIDE = 2


def maps(count: int = 3, channels: int = 4, high: int = 4, wide: int = 6) -> torch.Tensor:
    """Every value its own."""
    return torch.arange(count * channels * high * wide, dtype=torch.float32).view(
        count, channels, high, wide
    )


def test_interpolation_by_hand() -> None:
    """Of two channels of 4 x 4 the second holds, in its cell of row 1 and column 0,
    the second channel of patch 1.
    """
    patches = torch.tensor(
        [[[[1, 1], [1, 1]], [[2, 2], [2, 2]]], [[[5, 6], [7, 8]], [[-1, -2], [-3, -4]]]]
    ).float()
    items, cells = (
        Items(torch.tensor([[[1]]]), torch.tensor([True])),
        Cells(torch.tensor([[1]]), torch.tensor([[[2]]])),
    )
    found = interpolate(torch.zeros(1, 2, 4, 4), patches, items, cells)
    assert found[0, 0].abs().max() == 0
    assert found[0, 1].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [-1, -2, 0, 0], [-3, -4, 0, 0]]


@pytest.mark.parametrize(
    ("channels", "swaps", "seed"), [(1, 1, 0), (3, 2, 1), (4, 6, 2), (2, 99, 3)]
)
def test_exactly_p_channels_change_in_whole_cells_of_the_grid_and_in_the_same_channel_of_a_patch(
    channels: int, swaps: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    before, patches = maps(), -1 - torch.arange(5 * 4 * SIDE**2).view(5, 4, SIDE, SIDE).float()
    cells = Cells.draw(before, SIDE, channels, swaps, random)
    of = torch.tensor([0.0, 0, 1, 1, -1])
    items = Items.draw(torch.tensor([0, 1, 0]), of, cells, random, same=True)
    after = interpolate(before, patches, items, cells)
    for was, now in zip(before, after, strict=True):
        # [C, rows, columns]
        grids = (now != was).unflatten(1, (-1, SIDE)).unflatten(3, (-1, SIDE)).transpose(2, 3)
        whole, touched = grids.flatten(3).all(3), grids.flatten(3).any(3)
        assert (whole == touched).all()
        assert (
            (whole.sum((1, 2)) == min(swaps, 6)).sum() == channels == (whole.sum((1, 2)) > 0).sum()
        )
        for channel in whole.any((1, 2)).nonzero().flatten().tolist():
            cells_now = (
                now[channel].unflatten(0, (-1, SIDE)).unflatten(2, (-1, SIDE)).transpose(1, 2)
            )
            for cell in cells_now[whole[channel]]:
                assert any((cell == patch).all() for patch in patches[:4, channel])


def test_patches_are_of_the_samples_label_or_of_another_one_and_never_an_empty_place() -> None:
    random = torch.Generator().manual_seed(4)
    of = torch.tensor([-1, 2, 0, -1, 0, 1, 2, 0, -1]).float()
    labels = torch.tensor([0, 1, 2, 3])
    cells = Cells(torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 3, 50, dtype=torch.int64))
    same, other = (Items.draw(labels, of, cells, random, same=each) for each in (True, False))
    assert same.there.tolist() == [True, True, True, False]
    assert other.there.tolist() == [True] * 4
    for label in range(4):
        assert set(of[other.places[label]].flatten().tolist()) == {0.0, 1.0, 2.0} - {label}
        if same.there[label]:
            assert set(same.places[label].flatten().tolist()) == set(
                (of == label).nonzero().flatten().tolist()
            )
    alone = Items.draw(labels, torch.tensor([-1.0, 1.0]), cells, random, same=False)
    assert alone.there.tolist() == [True, False, True, True]


def test_a_patch_holds_in_each_channel_a_cell_of_its_own_of_one_image() -> None:
    images = np.random.default_rng(5).integers(0, 20, 200)
    found = cut(maps(20, 3, 4, 6).numpy(), images, SIDE, np.random.default_rng(5))
    image, channel, row, column = np.unravel_index(found.astype(int), (20, 3, 4, 6))
    assert (image == images[:, None, None, None]).all()
    assert (channel == np.arange(3)[:, None, None]).all()
    assert (row[:, :, 0, 0] % SIDE == 0).all()
    assert (column[:, :, 0, 0] % SIDE == 0).all()
    assert (row - row[:, :, :1, :1] == [[0, 0], [1, 1]]).all()
    assert (column - column[:, :, :1, :1] == [[0, 1], [0, 1]]).all()
    places = row[:, :, 0, 0] * 6 + column[:, :, 0, 0]
    assert len(np.unique(places)) == 6
    assert (places != places[:, :1]).any()
