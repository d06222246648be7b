"""The model card of a bundle: figures with intervals, limits,
and nothing that its manifest does not hold.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from broker_config.protocol.messages import ImagePrivacy
from edge.bundle.bundle_format import (
    Bundle,
    Confidence,
    HeldOut,
    Manifest,
    PrivacySpent,
    read_bundle,
)
from edge.bundle.comparison import Candidate, Comparison
from edge_node.extensions.record.model_card import model_card
from tests.support.gaussian_plant import gaussian_plant
from tests.support.tiny_bundle import PROVENANCE, tiny_bundle
from trainer.training import personal_model

COMPARISON = Comparison(
    images=24,
    guessing=0.8333,
    alone=Candidate(accuracy=0.5, low=0.31, high=0.69),
    together=Candidate(accuracy=0.75, low=0.55, high=0.88),
    mixed=Candidate(accuracy=0.8333, low=0.64, high=0.93),
    deployed="mixed",
)


@pytest.fixture
def plain(tmp_path: Path) -> Bundle:
    return tiny_bundle(tmp_path / "bundle", trained={"red": 12, "green": 3})


def changed(bundle: Bundle, **changes: object) -> str:
    return model_card(bundle._replace(manifest=msgspec.structs.replace(bundle.manifest, **changes)))


def test_it_has_counts_method_figures_with_intervals_limits_and_hashes(plain: Bundle) -> None:
    metrics = {
        "accuracy": 20 / 24,
        "accuracy_low": 0.64,
        "accuracy_high": 0.93,
        "images": 24.0,
        "cross_validated": 0.0,
    }
    card = changed(plain, provenance=PROVENANCE, comparison=COMPARISON, metrics=metrics)
    for expected in (
        "| red | 12 | 20 |",
        "| green | 3 | 4 |",
        "| blue | 0 | 0 |",
        "lambda=0.5",
        "learning rate 0.01",
        "seed 7",
        "5 expected, a round closed with 4 at least, aggregated by multi_krum",
        "96 x 96 pixels",
        "edge-node 0.2.0, torch 2.0",
        "83.3% (64.0% to 93.0%), on 24 images",
        "| alone | 50.0% | 31.0% to 69.0% |  |",
        "| mixed | 83.3% | 64.0% to 93.0% | yes |",
        "| red | 19 of 20 | 76.4% to 99.1% |",  # Wilson's
        "never seen by this plant: blue",
        "judged on fewer than 10 images: green (4)",
        "trained on fewer than 10 images of this plant: green (3)",
        "can hardly be told from guessing",
        "was chosen on the images that judge it",
        "whose entry 32 has the hash `" + "c" * 64,
        f"| manifest.json | {plain.digest} |",
        plain.manifest.roles["classifier"].sha256,
    ):
        assert expected in card, expected


def test_its_accuracy_is_the_one_that_the_plant_was_told(tmp_path: Path) -> None:
    folder = gaussian_plant(tmp_path, "plant-1")
    told = personal_model.load_metadata(folder / "model").metrics
    card = model_card(read_bundle(folder / "bundles" / "plant-1"))
    share = f"{told['accuracy']:.1%}"
    assert card.count(share) >= 3, "figures, comparison, and what a line makes of it"
    assert f"{told['accuracy_low']:.1%} to {told['accuracy_high']:.1%}" in card


def test_of_a_private_federation_it_says_what_was_spent_and_that_the_bundle_itself_is_not_private(
    plain: Bundle,
) -> None:
    spent = PrivacySpent(
        epsilon=2.9978, delta=1e-5, settings=ImagePrivacy(clip=0.5, noise=40.0, sums=2.783)
    )
    card = changed(plain, provenance=msgspec.structs.replace(PROVENANCE, privacy=spent))
    assert "spent epsilon 3 of each training image, at delta 1e-05" in card
    assert "gradients cut to 0.5 with noise 40, sums with noise 2.783" in card
    assert "knows the images as they are" in card
    assert "privacy" not in changed(plain, provenance=PROVENANCE)


def test_it_says_what_it_does_not_know(plain: Bundle) -> None:
    card = changed(plain, trained={}, metrics={})
    assert "the manifest does not say" in card
    assert "None: this plant had no labelled image" in card
    assert "None: this plant had too few" in changed(plain, metrics={})
    assert "not in this bundle" in card
    assert "a line notices neither" in card
    assert "%" not in card.replace("95 %", "")


def test_a_figure_without_an_interval_says_so_and_none_is_made_up(plain: Bundle) -> None:
    card = changed(plain, metrics={"auroc": 0.9})
    assert "Without intervals: auroc 0.9" in card
    assert "Wilson" not in card


def test_what_a_line_would_make_of_the_held_out_images_is_that_of_the_bundle_itself(
    tmp_path: Path,
) -> None:
    labels = np.array([0, 0, 1, 1])
    probabilities = np.array([[0.9, 0.1, 0], [0.2, 0.8, 0], [0.1, 0.9, 0], [0.1, 0.9, 0]])
    held_out = HeldOut.of(labels, probabilities, np.array([True, True, True, False]))
    sure = Confidence(images=4, thresholds={"red": 0.6}, held_out=held_out)
    card = model_card(
        tiny_bundle(tmp_path / "bundle", confidence=sure, trained={"red": 2, "green": 2})
    )
    assert "accuracy 75.0% (30 to 95; 3 of 4)" in card
    assert "red 0.60 (measured on 4 images)" in card


def test_names_that_others_chose_are_neither_markup_nor_control_a_terminal(plain: Bundle) -> None:
    card = changed(
        plain,
        classes=("a|b", "<script>", "\x1b[2J\n# Forged"),
        trained={"a|b": 20, "[x](http://y)": 3},
    )
    assert "\x1b" not in card
    assert "<script>" not in card.replace("\\<script\\>", "")
    assert "| a\\|b | 20 | unknown |" in card
    assert not any(line.lstrip("\\").startswith("# Forged") for line in card.splitlines())
    assert "\\[x\\](http" in card


def test_no_name_of_an_image_is_in_it(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path / "bundle", trained={"red": 1}, trained_on=("feedfacefeedface",))
    assert "feedface" not in model_card(bundle)
    assert "feedface" in (bundle.folder / "manifest.json").read_text()


def test_the_manifest_keeps_what_the_card_is_made_of(plain: Bundle) -> None:
    manifest = msgspec.structs.replace(plain.manifest, provenance=PROVENANCE)
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest
    assert read_bundle(plain.folder).manifest.provenance is None
