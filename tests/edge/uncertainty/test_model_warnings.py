"""Which bundles there are warnings about, and that each is told of the model in service."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edge.bundle.bundle_format import FALSE_REJECTS, Confidence, HeldOut, Manifest
from edge.bundle.comparison import Candidate, Comparison
from edge.inference.class_prior import Prior
from edge.inference.served_model import Model
from edge.inference.tiling import View
from edge.uncertainty.model_warnings import line_warnings, model_warnings
from tests.support.tiny_bundle import MEASURED, NEAR_GUESSING, tiny_bundle

LABELLED = {"accuracy": 0.5}


def compared(low: float) -> Comparison:
    """A comparison whose deployed candidate is right in `low` of the images at least;
    guessing in a third.
    """
    candidate = Candidate(accuracy=low + 0.1, low=low, high=low + 0.2)
    return Comparison(
        images=36,
        cross_validated=True,
        guessing=1 / 3,
        alone=candidate,
        together=candidate,
        mixed=candidate,
        deployed="mixed",
    )


def mostly_doubted() -> Confidence:
    """Held-out images that are all classified right, and all in doubt."""
    labels = np.arange(90) % 3
    held_out = HeldOut.of(labels, np.eye(3)[labels], np.zeros(90, bool))
    return Confidence(images=90, held_out=held_out)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return tiny_bundle(tmp_path_factory.mktemp("warnings") / "bundle").manifest


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, ["not_measured"], id="no labelled image"),
        pytest.param(
            {"metrics": LABELLED, "comparison": compared(0.4)},
            ["not_calibrated"],
            id="measured in training alone",
        ),
        pytest.param(
            {"metrics": LABELLED, "comparison": compared(1 / 3)},
            ["not_calibrated", "near_guessing"],
            id="near guessing in training",
        ),
        pytest.param(
            {"metrics": LABELLED, "confidence": Confidence(images=36)},
            ["not_calibrated"],
            id="no held-out figures",
        ),
        pytest.param(
            {"metrics": LABELLED, "confidence": MEASURED, "comparison": compared(0.1)},
            [],
            id="held-out figures count before those of training",
        ),
        pytest.param(
            {"metrics": LABELLED, "confidence": NEAR_GUESSING, "comparison": compared(0.9)},
            ["near_guessing"],
            id="near guessing on held-out images",
        ),
        pytest.param({"confidence": mostly_doubted()}, ["mostly_in_doubt"], id="mostly in doubt"),
        pytest.param({"metrics": {FALSE_REJECTS: 0.1}}, [], id="made of good images alone"),
    ],
)
def test_what_a_manifest_gives_reason_to_warn_of(
    manifest: Manifest, changes: dict[str, Any], expected: list[str]
) -> None:
    changed = msgspec.structs.replace(manifest, **changes)
    found = model_warnings(changed, View(), Prior())
    assert [each.id for each in found] == expected


def test_the_lines_own_weights_decide_whether_its_verdicts_are_near_guessing(
    manifest: Manifest,
) -> None:
    measured = msgspec.structs.replace(manifest, confidence=MEASURED)
    always_red = Prior(classes={"red": 1e6})
    assert [each.id for each in model_warnings(measured, View(), always_red)] == ["near_guessing"]


def test_a_model_in_service_also_warns_that_it_expires(tmp_path: Path) -> None:
    model = Model.from_bundle(
        tiny_bundle(tmp_path / "bundle", confidence=MEASURED),
        threads=1,
        expiry_dates={"charter": datetime.now(UTC) + timedelta(days=3)},
    )
    assert [each.id for each in line_warnings(model, View(), Prior())] == ["charter_expiry"]
