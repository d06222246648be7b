"""Accuracy, doubts, missed defects and false rejects on labelled images,
and what a bundle's own images say of them.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge.bundle.bundle_format import BundleError, Confidence, HeldOut, Manifest, parse_manifest
from edge.inference.class_prior import Prior
from edge.inference.tiling import View
from edge.uncertainty.model_warnings import performance_warnings
from edge.uncertainty.performance import (
    Labelled,
    Proportion,
    held_out_performance,
    measure,
    wilson_interval,
)
from tests.support.tiny_bundle import tiny_bundle

CLASSES = ("no_defect", "scratch", "dent")


def judged(*rows: tuple[str, str, int], doubted: bool = False) -> list[Labelled]:
    """Verdicts by truth, label and how many of them."""
    return [
        Labelled(truth, label, label != "no_defect", doubted)
        for truth, label, count in rows
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Of a bundle that has seen 300 held-out images, whose probabilities are right on average."""
    random = np.random.default_rng(0)
    probabilities = random.dirichlet((0.6, 0.4, 0.4), 300)
    labels = np.array([random.choice(3, p=row) for row in probabilities])
    confidence = Confidence(
        images=300, held_out=HeldOut.of(labels, probabilities, probabilities.max(1) > 0.7)
    )
    return tiny_bundle(
        tmp_path_factory.mktemp("performance") / "bundle", classes=CLASSES, confidence=confidence
    ).manifest


def test_errors_are_shares_of_the_images_that_can_have_them():
    found = measure(
        judged(
            ("no_defect", "no_defect", 17),
            ("no_defect", "dent", 3),
            ("dent", "scratch", 5),
            ("dent", "dent", 33),
        )
        + judged(("scratch", "no_defect", 2), doubted=True),
        3,
        "no_defect",
    )
    assert (found.accuracy.count, found.accuracy.images) == (50, 60)
    assert found.missed is not None
    assert (found.missed.count, found.missed.images) == (2, 40)
    assert found.false_rejects is not None
    assert (found.false_rejects.count, found.false_rejects.images) == (3, 20)
    assert (found.in_doubt.count, found.accepted and found.accepted.images) == (2, 58)
    assert found.confusion["dent"] == {"scratch": 5, "dent": 33}
    assert found.guessing == 38 / 60
    assert (found.missed.low, found.missed.high) == wilson_interval(2, 40)
    assert "missed defects 5.0% (1 to 17; 2 of 40), false rejects 15.0% (5 to 36; 3 of 20)" in str(
        found
    )
    assert list(performance_warnings(found)) == []


def test_a_model_without_a_class_for_no_defect_confuses_defects_and_that_is_told():
    found = measure(
        judged(("dent", "scratch", 5), ("dent", "dent", 15), ("scratch", "scratch", 20)), 2, None
    )
    assert (found.missed, found.false_rejects) == (None, None)
    assert "no class means no defect" in found.errors
    assert "dent taken for scratch 5 of 20" in found.errors


def test_images_of_one_kind_leave_the_other_error_unknown():
    good = measure(judged(("no_defect", "no_defect", 9)), 3, "no_defect")
    assert (good.missed, good.guessing) == (None, 1 / 3)
    assert "missed defects unknown" in good.errors
    assert "false rejects unknown" in measure(judged(("dent", "dent", 9)), 3, "no_defect").errors


def test_a_model_that_is_mostly_in_doubt_or_no_better_than_guessing_is_warned_of():
    poor = judged(
        ("dent", "dent", 13),
        ("dent", "scratch", 12),
        ("scratch", "dent", 12),
        ("scratch", "scratch", 13),
    )
    found = measure(
        [each._replace(doubted=number < 38) for number, each in enumerate(poor)], 2, None
    )
    doubt, guessing = performance_warnings(found)
    assert (doubt.id, guessing.id) == ("mostly_in_doubt", "near_guessing")
    assert "76%" in doubt.text
    assert list(performance_warnings(measure(poor, 2, None))) == [guessing]


@pytest.mark.parametrize("cost", [0.2, 1.0, 5.0])
def test_a_bundles_threshold_costs_hardly_more_than_the_best_there_is(manifest, cost):
    def spent(view: View) -> float:
        found = held_out_performance(manifest, view, Prior())
        assert found is not None
        assert found.missed is not None
        assert found.false_rejects is not None
        return cost * found.missed.count + found.false_rejects.count

    best = min(spent(View(threshold=threshold)) for threshold in np.linspace(0, 1, 201).tolist())
    assert best <= spent(View(missed_cost=cost)) <= 1.15 * best


def test_the_dearer_a_missed_defect_the_fewer_are_missed_and_the_more_good_parts_rejected(manifest):
    found = [
        held_out_performance(manifest, View(missed_cost=cost), Prior())
        for cost in (0.1, 1.0, 10.0, 100.0)
    ]
    missed = [each.missed.share for each in found if each and each.missed]
    rejects = [each.false_rejects.share for each in found if each and each.false_rejects]
    assert missed == sorted(missed, reverse=True)
    assert missed[0] > missed[-1]
    assert rejects == sorted(rejects)
    assert rejects[0] < rejects[-1]


def test_errors_are_told_under_the_lines_prior(manifest):
    taught = msgspec.structs.replace(manifest, trained={"no_defect": 9, "dent": 9})
    found = [
        held_out_performance(taught, View(), Prior(untaught=weight)) for weight in (1, 0.2, 1e-6)
    ]
    named = [
        sum(row.get("scratch", 0) for row in each.confusion.values()) for each in found if each
    ]
    assert found[0] == held_out_performance(manifest, View(), Prior())
    assert named[0] > named[1] > named[2]


def test_the_line_says_which_class_means_no_defect(manifest):
    found = held_out_performance(manifest, View(no_defect="dent"), Prior())
    assert found is not None
    assert found.missed is not None
    assert found.missed.images == sum(
        sum(row.values()) for truth, row in found.confusion.items() if truth != "dent"
    )


def test_a_bundle_that_was_measured_on_nothing_says_nothing(tmp_path):
    assert held_out_performance(tiny_bundle(tmp_path / "bundle").manifest, View(), Prior()) is None
    assert Proportion.of([]) is None


@pytest.mark.parametrize(
    "damage",
    [
        HeldOut(labels=b"\0\0", probabilities=b"", accepted=b"\0"),
        HeldOut(labels=b"", probabilities=b"", accepted=b""),
        HeldOut(labels=b"\x07\0", probabilities=b"\0" * 6, accepted=b"\0"),
        HeldOut(labels=b"\0", probabilities=b"\0" * 7, accepted=b"\0"),
    ],
)
def test_held_out_images_that_do_not_fit_the_classes_are_refused(manifest, damage):
    confidence = msgspec.structs.replace(manifest.confidence, held_out=damage)
    content = msgspec.json.encode(msgspec.structs.replace(manifest, confidence=confidence))
    with pytest.raises(BundleError, match="held-out"):
        parse_manifest(Path("b"), content)
