"""Spoilt banks of the FedTFI ablation: patches differ as they should, and nothing else does."""

import numpy as np
import pytest

from edge_node.extensions.textures import patch_bank
from research.studies.exchange_parts import SPOILT, spoil
from trainer.models.named_tensors import Arrays
from trainer.seeding import generator

FILLED = 300


def full(seed: int) -> Arrays:
    """A bank of 512 places, some of them empty, with channels of very different moments."""
    random = generator(seed, "bank")
    found = patch_bank.make_empty_bank(512, 3, 2)
    scale, mean = np.array([0.1, 1, 30])[:, None, None], np.array([5, 0, -40])[:, None, None]
    found["bank.patches"][:FILLED] = random.standard_normal((FILLED, 3, 2, 2)) * scale + mean
    found["bank.labels"][:FILLED] = random.integers(4, size=FILLED)
    found["bank.owners"][:FILLED] = random.integers(8, size=FILLED)
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", SPOILT)
def test_labels_owners_and_empty_places_stay_and_patches_do_not(name: str, seed: int) -> None:
    honest = full(seed)
    spoilt = spoil(name, honest)
    for each in ("bank.labels", "bank.owners"):
        assert np.array_equal(spoilt[each], honest[each])
    assert not spoilt["bank.patches"][FILLED:].any()
    moved = (spoilt["bank.patches"] != honest["bank.patches"]).any((1, 2, 3))
    assert moved[:FILLED].mean() > 0.98
    assert np.array_equal(spoil(name, honest)["bank.patches"], spoilt["bank.patches"])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_patches_of_any_label_are_the_banks_own(seed: int) -> None:
    honest, spoilt = full(seed)["bank.patches"], spoil("any label", full(seed))["bank.patches"]
    assert sorted(map(np.ndarray.tobytes, spoilt)) == sorted(map(np.ndarray.tobytes, honest))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_drawn_patches_have_each_channels_mean_and_deviation(seed: int) -> None:
    honest, spoilt = (
        each["bank.patches"][:FILLED] for each in (full(seed), spoil("drawn", full(seed)))
    )
    deviation = honest.std((0, 2, 3))
    assert np.abs((spoilt - honest).mean((0, 2, 3)) / deviation).max() < 0.15
    assert np.allclose(spoilt.std((0, 2, 3)), deviation, rtol=0.1)


def test_an_empty_bank_stays_empty() -> None:
    empty = patch_bank.make_empty_bank(8, 3, 2)
    assert not spoil("drawn", empty)["bank.patches"].any()
