"""Warnings about the model that a line serves: a poor one, one that nobody measured,
one that expires.

Export, `serve`, `GET /`, the page and the metrics ask here, so they all say the same.
"""

import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

from edge.bundle.bundle_format import FALSE_REJECTS, Manifest
from edge.bundle.expiry import expiry_warnings
from edge.inference.class_prior import Prior
from edge.inference.served_model import Model
from edge.inference.tiling import View
from edge.uncertainty.performance import Performance, held_out_performance

_MOSTLY = 0.5  # share of verdicts in doubt, above which a person looks at most images

WarningId = Literal[
    "not_measured",
    "not_calibrated",
    "mostly_in_doubt",
    "near_guessing",
    "bundle_expiry",
    "charter_expiry",
]

_EXPIRY: Mapping[Literal["bundle", "charter"], WarningId] = {
    "bundle": "bundle_expiry",
    "charter": "charter_expiry",
}
_log = logging.getLogger(__name__)


class ModelWarning(Struct, frozen=True, kw_only=True):
    """A warning about a model, with what to do."""

    id: WarningId  # never changes, for programs and translations
    text: str


def model_warnings(manifest: Manifest, view: View, prior: Prior) -> tuple[ModelWarning, ...]:
    """Return what a bundle's manifest gives reason to warn of, under a view and a prior.

    A detector made of good images gives none: its threshold comes from these, each judged by a
    detector that was made without it. It knows no other doubts.
    """
    if FALSE_REJECTS in manifest.metrics:
        return ()
    found = held_out_performance(manifest, view, prior)
    warnings = []
    if not manifest.metrics and not manifest.comparison and not found:
        text = (
            "nobody has measured this model: its plant had no images that could judge it, so its "
            "accuracy is unknown; label images of each class, join again and export again"
        )
        warnings.append(ModelWarning(id="not_measured", text=text))
    elif found is None:
        text = (
            "it is not calibrated: how far its confidence can be trusted is unknown, and the "
            "bundle has no limit below which a verdict is in doubt; label more images and export "
            "again on the machine that trained, or set [doubt] confidence"
        )
        warnings.append(ModelWarning(id="not_calibrated", text=text))
        warnings.extend(_comparison_warnings(manifest))
    else:
        warnings.extend(performance_warnings(found))
    return tuple(warnings)


def performance_warnings(found: Performance) -> Iterator[ModelWarning]:
    """Yield what verdicts on labelled images give reason to warn of."""
    if found.in_doubt.share > _MOSTLY:
        text = (
            f"{found.in_doubt.share:.0%} of its verdicts are in doubt: a person must look at "
            "most images; label more of them, or set [doubt] confidence to accept more"
        )
        yield ModelWarning(id="mostly_in_doubt", text=text)
    if found.accuracy.low <= found.guessing:
        yield _near_guessing(str(found.accuracy), found.guessing)


def line_warnings(model: Model, view: View, prior: Prior) -> tuple[ModelWarning, ...]:
    """Return all that there is to warn of in a model in service: that it expires, and the rest."""
    expiring = [
        ModelWarning(id=_EXPIRY[what], text=text)
        for what, text in expiry_warnings(model.expiry_dates, datetime.now(UTC)).items()
    ]
    return (*expiring, *model_warnings(model.manifest, view, prior))


def log_model_warnings(manifest: Manifest, view: View, prior: Prior) -> None:
    """Log the warnings about a model that is served from now on."""
    for each in model_warnings(manifest, view, prior):
        _log.warning("%s: %s", manifest.id, each.text)


def _comparison_warnings(manifest: Manifest) -> Iterator[ModelWarning]:
    """Yield near guessing where only training measured the accuracy."""
    measured = manifest.comparison
    if measured is None:
        return
    chosen = measured.chosen
    if chosen.low <= measured.guessing:
        accuracy = (
            f"{chosen.accuracy:.1%} ({100 * chosen.low:.0f} to {100 * chosen.high:.0f}; of "
            f"{measured.images})"
        )
        yield _near_guessing(accuracy, measured.guessing)


def _near_guessing(accuracy: str, guessing: float) -> ModelWarning:
    text = (
        f"its accuracy may be no better than guessing: {accuracy}, where guessing is right in "
        f"{guessing:.1%}; label more images before it decides anything"
    )
    return ModelWarning(id="near_guessing", text=text)
