"""Uncertainty of a verdict: nothing to see, low confidence, disagreeing encoders,
an image unlike any held-out one.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from edge.bundle.reference import disagreement, quantile
from edge.inference.outcomes import Box, Verdict
from edge.inference.pipeline import Inspection
from edge.inference.served_model import Model
from edge.uncertainty.blank_frame import is_blank

Share = Annotated[float, Meta(ge=0, lt=1)]
Doubt = Literal["confidence", "disagreement", "novelty", "blank"]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[doubt]` of a line's settings: which verdicts a person should look at.

    A share is that of ordinary images that may be doubted; 0 doubts none.
    `research/studies/novelty.py` measures how many images of untaught kinds each finds: novelty the
    most, disagreement fewer than the model's own confidence.
    """

    # least, of any class; None: the bundle's thresholds
    confidence: Annotated[float, Meta(ge=0, le=1)] | None = None
    novelty: Share = 0.05
    disagreement: Share = 0.0
    blank: bool = True  # doubt frames that show nothing: one gray, or noise


class Limits(NamedTuple):
    """Limits beyond which a model's verdicts are doubted."""

    confidence: dict[str, float]  # minimum, of each class
    novelty: float | None  # maximum; None where there is no reference
    disagreement: float | None

    @staticmethod
    def from_model(model: Model, settings: Settings) -> "Limits":
        """The limits of a model's bundle, as the settings override them."""
        manifest = model.manifest
        reference = model.predictor.reference
        confidence = manifest.confidence.thresholds if manifest.confidence else {}
        if settings.confidence is not None:
            confidence = dict.fromkeys(manifest.classes, settings.confidence)
        if reference is None:
            return Limits(confidence, None, None)
        with_disagreement = len(reference.disagreement) and settings.disagreement
        quantile_or_none = (
            quantile(reference.novelty, 1 - settings.novelty) if settings.novelty else None
        )
        own_quantile = (
            quantile(reference.disagreement, 1 - settings.disagreement)
            if with_disagreement
            else None
        )
        return Limits(confidence, quantile_or_none, own_quantile)


class TileUncertainty(NamedTuple):
    """Reasons to doubt a tile's class, and the measurements."""

    doubts: tuple[Doubt, ...]
    disagreement: float | None
    novelty: float | None


class UncertaintyCheck:
    """The monitor that adds to each verdict the reasons to doubt it.

    A tiled frame is doubted for its deciding tile.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cached: tuple[Model, Limits] | None = None

    @property
    def expected_share(self) -> float:
        """The share of ordinary images that are doubted for reasons other than confidence."""
        return min(1, self._settings.novelty + self._settings.disagreement)

    def __call__(self, inspection: Inspection) -> Verdict:
        """The verdict with its doubts, its novelty and its encoders' disagreement,
        as far as the bundle gives them.
        """
        found = self._assess(
            inspection, inspection.tile, inspection.verdict.label, inspection.verdict.confidence
        )
        if self._settings.blank and is_blank(
            inspection.tiled.photo, _region(inspection.tiled.boxes)
        ):
            found = found._replace(doubts=("blank", *found.doubts))
        return msgspec.structs.replace(inspection.verdict, **found._asdict())

    def doubts_of_tile(self, inspection: Inspection, tile: int) -> tuple[Doubt, ...]:
        """Reasons to doubt a tile as if it were the whole frame;
        whether it is blank is left out.
        """
        row = inspection.probabilities[tile]
        return self._assess(
            inspection, tile, inspection.model.manifest.classes[int(row.argmax())], float(row.max())
        ).doubts

    def _assess(
        self, inspection: Inspection, tile: int, label: str, confidence: float
    ) -> TileUncertainty:
        limits = self._limits(inspection.model)
        outputs = inspection.outputs
        part = slice(tile, tile + 1)
        reference = inspection.model.predictor.reference
        apart = novelty = None
        if outputs.opinions is not None and outputs.opinions.shape[1] > 1:
            apart = float(disagreement(outputs.opinions[part])[0])
        if outputs.features is not None and reference is not None:
            novelty = float(reference.nearest_distance(outputs.features[part])[0])
        found: dict[Doubt, bool] = {
            "confidence": confidence < limits.confidence.get(label, 0),
            "disagreement": _exceeds(apart, limits.disagreement),
            "novelty": _exceeds(novelty, limits.novelty),
        }
        return TileUncertainty(
            tuple(name for name, doubted in found.items() if doubted), apart, novelty
        )

    def _limits(self, model: Model) -> Limits:
        if self._cached is None or self._cached[0] is not model:
            self._cached = model, Limits.from_model(model, self._settings)
        return self._cached[1]


def _exceeds(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _region(boxes: Sequence[Box]) -> Box:
    """The area that tiles cover, which begin at its top left and end at its bottom right."""
    (left, top, *_) = boxes[0]
    (last_left, last_top, width, height) = boxes[-1]
    return Box(left, top, last_left + width - left, last_top + height - top)
