"""Masks cancel in the sum, bit for bit; one masked contribution tells nothing."""

import numpy as np
import pytest

from broker_config.security import mask_keys
from broker_config.security.mask_keys import RoundSecrets, Scope
from trainer.federation.masking.masks import apply_masks
from trainer.models.named_tensors import Arrays

SCOPE = Scope("steel", "0123456789abcdef", 3, "e" * 64)


def contributions(nodes: int, size: int = 1000) -> dict[str, Arrays]:
    """Small differences, as they lie on the grid; and sums of statistics."""
    found = {}
    for number in range(nodes):
        generator = np.random.default_rng(number)
        steps = np.rint(generator.normal(0, 2000, size)).astype(np.int32)
        found[f"plant-{number}"] = {
            "b": steps.view(np.uint32),
            "a": np.array(7 + number, np.uint32),
            "c": generator.integers(-(2**60), 2**60, (4, 5)),
        }
    return found


def masks_of(names: list[str]) -> dict[str, list[tuple[bytes, int]]]:
    own = {name: RoundSecrets(mask_keys.draw_root(), SCOPE, name) for name in names}
    cohort = {name: each.public() for name, each in own.items()}
    return {
        name: each.seeds(cohort, [other for other in names if other != name])
        for name, each in own.items()
    }


def add(parts: list[Arrays]) -> Arrays:
    """Modulo 2^32 or 2^64."""
    with np.errstate(over="ignore"):
        return {
            name: np.asarray(sum(each[name] for each in parts), parts[0][name].dtype)
            for name in parts[0]
        }


def as_bytes(arrays: Arrays) -> dict[str, bytes]:
    return {name: each.tobytes() for name, each in arrays.items()}


@pytest.mark.parametrize("nodes", [3, 10])
def test_the_sum_of_what_is_masked_is_the_open_sum_once_own_masks_are_taken_away(
    nodes: int,
) -> None:
    words = contributions(nodes)
    masks = masks_of([*words])
    masked = add([apply_masks(each, masks[name]) for name, each in words.items()])
    own = [(seed, -1) for each in masks.values() for seed, sign in each[:1]]
    assert as_bytes(apply_masks(masked, own)) == as_bytes(add([*words.values()]))
    assert as_bytes(masked) != as_bytes(add([*words.values()]))


def test_a_mask_that_is_left_leaves_nothing_of_the_sum() -> None:
    words = contributions(4)
    masks = masks_of([*words])
    masked = add([apply_masks(each, masks[name]) for name, each in words.items()])
    # all but one node's own
    found = apply_masks(masked, [(masks[name][0][0], -1) for name in [*words][1:]])
    assert is_random(found["b"], add([*words.values()])["b"])


def is_random(words: np.ndarray, true: np.ndarray) -> bool:
    """Whether bytes are even (chi-square of 256 cells,
    255 degrees of freedom) and say nothing of the true values.

    Both limits are five standard deviations: an honest run of this test fails once in a million.
    """
    counts = np.bincount(words.view(np.uint8).ravel(), minlength=256)
    expected = words.nbytes / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    correlation = float(
        np.corrcoef(words.view(np.int32).ravel(), true.view(np.int32).ravel())[0, 1]
    )
    return abs(chi_square - 255) < 5 * np.sqrt(2 * 255) and abs(correlation) < 5 / np.sqrt(
        words.size
    )


def test_one_masked_contribution_tells_nothing_and_an_open_one_all() -> None:
    words = contributions(3, size=200_000)
    masks = masks_of([*words])
    for name, each in words.items():
        assert is_random(apply_masks(each, masks[name])["b"], each["b"])
        # Whoever has the own mask, or all but one of the pairs', is no farther.
        for known in range(len(masks[name])):
            left = [mask for number, mask in enumerate(masks[name]) if number == known]
            assert is_random(apply_masks(each, left)["b"], each["b"])
        assert not is_random(each["b"], each["b"])


def test_the_same_update_is_masked_otherwise_in_another_round() -> None:
    words = contributions(3, size=200_000)
    first, second = ([masks_of([*words])["plant-0"]] for _ in range(2))
    one, other = (
        apply_masks(words["plant-0"], first[0])["b"],
        apply_masks(words["plant-0"], second[0])["b"],
    )
    assert is_random(one - other, words["plant-0"]["b"])
    assert is_random(one, other)


def test_the_mask_is_the_keystream_of_the_page() -> None:
    """RFC 8439's ChaCha20 with key, counter and nonce of zeros begins 76b8e0ada0f13d90."""
    zero = {"b": np.zeros(1, np.uint32), "a": np.zeros((), np.uint32)}
    masked = apply_masks(zero, [(bytes(32), 1)])
    assert masked["a"].tobytes().hex() + masked["b"].tobytes().hex() == "76b8e0ada0f13d90"
