"""Noise from a secret: normal, the same for the same key, and nobody else's."""

import numpy as np
import pytest

from trainer.privacy.noise import derive_key, draw_normal

SECRET = b"0123456789abcdef"


def test_numbers_are_normal_and_none_tells_of_another() -> None:
    drawn = draw_normal([derive_key(SECRET, bytes([number])) for number in range(8)], 100_001)
    assert drawn.shape == (8, 100_001)
    assert abs(drawn.mean()) < 0.01
    assert drawn.std() == pytest.approx(1, rel=0.005)
    for limit, share in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):
        assert (np.abs(drawn) > limit).mean() == pytest.approx(share, rel=0.05)
    assert np.abs(np.corrcoef(drawn) - np.eye(8)).max() < 0.02
    assert (
        abs(np.corrcoef(drawn[:, :50_000].ravel(), drawn[:, 50_000:100_000].ravel())[0, 1]) < 0.01
    )


def test_the_same_key_draws_the_same_and_every_part_of_it_counts() -> None:
    parts = [b"gradients", b"round 1"]
    first = draw_normal([derive_key(SECRET, *parts)], 100)
    assert np.array_equal(first, draw_normal([derive_key(SECRET, *parts)], 100))
    for secret, other in (
        (b"another secret!!", parts),
        (SECRET, [b"gradients", b"round 2"]),
        (SECRET, [b"gradientsr", b"ound 1"]),
        (SECRET, [b"gradients"]),
    ):
        assert abs(np.corrcoef(first, draw_normal([derive_key(secret, *other)], 100))[0, 1]) < 0.5


def test_a_secret_that_could_be_guessed_draws_nothing() -> None:
    with pytest.raises(ValueError, match="secret"):
        derive_key(b"short")
