"""Attacks on patches: they find what can be found, and nothing where nothing is left."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from edge_node.extensions.audit import measures
from edge_node.extensions.audit import patch_inference as inference
from edge_node.extensions.audit import patch_inversion as inversion
from edge_node.extensions.audit.patch_inversion import Plant
from edge_node.extensions.textures.patches import cut
from research.runner.store import Records
from research.studies import map_inversion, patch_guesses, patch_leak
from research.studies.patch_leak import Asked, Leak
from trainer.privacy.patch_protection import Protection, draw_mixtures
from trainer.seeding import generator

pytestmark = pytest.mark.slow

PLAIN = Protection()


def plant(seed: int, count: int = 96, shift: float = 0.0) -> Plant:
    """Smooth images of 16 pixels, each of a brightness of its own, and maps [n, 12, 4, 4]:
    their pixels, turned.
    """
    random = generator(seed, "plant")
    coarse = (
        random.uniform(0.2, 0.8, (count, 3, 1, 1))
        + 0.2 * random.uniform(-1, 1, (count, 3, 4, 4))
        + shift
    )
    images = np.repeat(np.repeat(coarse, 4, 2), 4, 3).clip(0, 1).astype(np.float32)
    turned = np.linalg.qr(generator(0, "turn").standard_normal((48, 12)))[0].astype(np.float32)
    blocks = (
        images.reshape(count, 3, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5).reshape(count, 4, 4, 48)
    )
    return inversion.plant(
        images,
        np.arange(count) % 3,
        np.ascontiguousarray((blocks @ turned).transpose(0, 3, 1, 2)),
        2,
    )


@pytest.fixture(scope="module")
def attacker() -> Plant:
    return plant(1)


@pytest.fixture(scope="module")
def victim() -> Plant:
    return plant(2)


def test_the_attacker_cuts_patches_as_nodes_do(victim: Plant) -> None:
    sent = inversion.items(victim, 40, PLAIN, generator(5))
    random = generator(5)
    rows = draw_mixtures(victim.labels, 40, 1, random)
    np.testing.assert_array_equal(sent.patches, cut(victim.maps.numpy(), rows.ravel(), 2, random))


def test_the_pixels_of_an_item_are_those_under_its_first_channel() -> None:
    count, side = 3, 8
    images = generator(0).random((count, 3, side, side)).astype(np.float32)
    maps = images[:, :1, ::2, ::2]  # a cell is the corner of its two by two pixels
    small = inversion.plant(images, np.zeros(count, np.int64), np.ascontiguousarray(maps), 2)
    sent = inversion.items(small, 20, PLAIN, generator(1))
    np.testing.assert_array_equal(inversion.pixels(small, sent)[:, :1, ::2, ::2], sent.patches)


def test_whole_maps_give_the_images_back_and_patches_of_one_place_theirs(
    attacker: Plant, victim: Plant
) -> None:
    guess = map_inversion.of_maps(attacker, 15, 0)(victim.maps)
    blind = np.broadcast_to(attacker.images.mean(0), victim.images.shape)
    assert map_inversion.psnr(guess, victim.images) > map_inversion.psnr(blind, victim.images) + 6
    sent = inversion.items(victim, 96, PLAIN, generator(3), together=True)
    truth = inversion.pixels(victim, sent)
    guess = inversion.of_items(attacker, PLAIN, 6, 0, together=True)(torch.from_numpy(sent.patches))
    assert (
        map_inversion.psnr(guess, truth)
        > map_inversion.psnr(np.broadcast_to(blind.mean((2, 3), keepdims=True), truth.shape), truth)
        + 6
    )


def test_places_that_are_known_give_more_of_an_image_the_more_items_there_are(
    attacker: Plant, victim: Plant
) -> None:
    reached = []
    for count in (1, 8):
        seen = map_inversion.scatter(victim, PLAIN, count, generator(4), attacker.measure)
        reached.append(
            map_inversion.psnr(
                map_inversion.of_places(attacker, PLAIN, count, 6, 0)(seen), victim.images
            )
        )
    assert reached[1] > reached[0] + 1


def test_scattered_items_are_the_maps_where_they_are_known(victim: Plant) -> None:
    seen = map_inversion.scatter(victim, PLAIN, 3, generator(4), victim.measure)
    values, known = seen[:, :12], seen[:, 12:]
    mean, deviation = (torch.from_numpy(each)[:, None, None] for each in victim.measure)
    torch.testing.assert_close(values, known * (victim.maps - mean) / deviation)
    assert 0.3 < float(known.mean()) < 0.7


def test_an_image_behind_an_item_is_found_until_noise_hides_it(
    victim: Plant, attacker: Plant
) -> None:
    suspects = victim.join(plant(3))
    for protection, least, most in (
        (PLAIN, 0.999, 1.0),
        (Protection(levels=2), 0.9, 1.0),
        (Protection(noise=20), 0.3, 0.7),
        (Protection(noise=20, levels=4), 0.3, 0.7),
    ):
        sent = inversion.items(victim, 96, protection, generator(6))
        scores = inference.found(sent, suspects, attacker, victim.measure, protection)
        behind = np.arange(len(scores)) < 96
        assert least <= measures.auc(scores, behind) <= most
        assert (
            protection != PLAIN or ((scores > 0) == behind).all()
        )  # each explains its item better than any other image does


def test_items_of_one_image_are_linked_by_what_its_places_have_in_common(
    attacker: Plant, victim: Plant
) -> None:
    scores, alike = patch_guesses.linked(attacker, victim, PLAIN, 48, 0)
    assert measures.auc(scores, alike == 1) > 0.7


def test_the_shares_that_are_caught_and_the_noise_are_those_counted_by_hand() -> None:
    positive = np.array([True, True, False, False])
    for values, share in (
        ([3, 4, 1, 2], 1.0),
        ([1, 2, 3, 4], 0.0),
        ([1, 1, 1, 1], 0.0),
        ([2, 4, 1, 3], 0.5),
    ):
        assert patch_guesses.caught(np.array(values, np.float32), positive) == share
    dark, bright = np.full((1, 3, 8, 8), 0.2, np.float32), np.full((1, 3, 8, 8), 0.6, np.float32)
    assert map_inversion.psnr(dark, bright) == pytest.approx(-10 * np.log10(0.16), rel=1e-4)


def test_a_table_has_the_means_over_seeds_and_a_line_that_was_cut_off_does_not_count(
    tmp_path: Path,
) -> None:
    asked = Asked(
        data="kth",
        knows="same",
        view="sent",
        protection=Protection(noise=2, mix=4),
        rounds=3,
        seed=0,
    )
    told = dict.fromkeys(
        ("class", "most frequent class", "plant", "found", "found at 1 %", "linked"), 0.5
    )
    lines = [
        Leak(
            asked=msgspec.structs.replace(asked, seed=seed),
            psnr=10 + seed,
            ssim=0.5,
            guess_psnr=9,
            guess_ssim=0.4,
            told=told,
            accuracy=0.8 + 0.1 * seed,
        )
        for seed in (0, 1)
    ]
    file = tmp_path / "leak.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + b'{"asked":')
    assert list(Records(file, Leak)) == lines
    row = patch_leak.table(lines).splitlines()[-1]
    assert row.startswith("| kth | same | 3 | sent | noise=2 mix=4 | 10.5 | 9.0 | 0.50 | 0.40 |")
    assert row.endswith("| 85.0 % |")
