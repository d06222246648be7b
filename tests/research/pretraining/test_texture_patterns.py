"""Kinds of texture: drawn from a seed, alike within a kind, different between kinds."""

import numpy as np
import pytest

from research.pretraining.texture_patterns import texture
from trainer.data import drawn_surfaces
from trainer.seeding import generator

SIZE, COUNT = 64, 8
LOOK = drawn_surfaces.draw_style(0, 0)


def images(seed: int, kind: int, key: int = 0) -> np.ndarray:
    return texture(seed, kind)(generator(key, "images"), LOOK, COUNT, SIZE)


def spectrum(patterns: np.ndarray) -> np.ndarray:
    """Mean power by direction and scale [64], of patterns [n, S, S]: what a texture is,
    wherever its details lie.
    """
    power = np.abs(np.fft.rfft2(patterns - patterns.mean((1, 2), keepdims=True))).mean(0)
    coarse = power[: SIZE // 2, : SIZE // 2].reshape(8, 4, 8, 4).mean((1, 3)).ravel()
    return np.asarray(np.log(coarse + 1e-3))


@pytest.mark.parametrize("kind", range(0, 40, 3))
def test_a_kind_is_finite_visible_and_never_twice_the_same(kind: int) -> None:
    drawn = images(1, kind)
    assert drawn.shape == (COUNT, SIZE, SIZE)
    assert np.isfinite(drawn).all()
    assert drawn.std((1, 2)).max() > 1
    assert len({image.tobytes() for image in drawn}) == COUNT


def test_seed_and_number_determine_a_kind() -> None:
    assert np.array_equal(images(3, 5), images(3, 5))
    assert not np.allclose(spectrum(images(3, 5)), spectrum(images(3, 6)), atol=0.5)
    assert not np.allclose(spectrum(images(3, 5)), spectrum(images(4, 5)), atol=0.5)


def test_kinds_can_be_told_apart_by_more_than_chance() -> None:
    kinds = range(30)
    known = np.stack([spectrum(images(0, kind, key=1)) for kind in kinds])
    unseen = np.stack([spectrum(images(0, kind, key=2)) for kind in kinds])
    nearest = ((unseen[:, None] - known) ** 2).sum(2).argmin(1)
    assert np.mean(nearest == np.arange(30)) > 0.7
