"""Doubts in a verdict: the model is not sure of it, its encoders disagree, or it has seen nothing like the image."""

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from edge.inference.pipeline import Inspection
from edge.inference.served_model import Model
from edge.inference.verdict import Verdict
from edge.uncertainty.reference import disagreement, quantile

Share = Annotated[float, Meta(ge=0, lt=1)]
Doubt = Literal["confidence", "disagreement", "novelty"]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[doubt]` of a line's settings: which verdicts somebody should look at.

    Shares are of ordinary images that may be doubted, and 0 doubts none. `research/studies/novelty.py` measures each:
    novelty the most of what a model was never taught, disagreement less than the model's own confidence.
    """

    confidence: Annotated[float, Meta(ge=0, le=1)] | None = None  # least, of any class; None: the bundle's thresholds
    novelty: Share = 0.05
    disagreement: Share = 0.0


class Limits(NamedTuple):
    """What a model's verdicts are measured with."""

    confidence: dict[str, float]  # least, of each class
    novelty: float | None  # most; None where there is no reference
    disagreement: float | None

    @staticmethod
    def of(model: Model, settings: Settings) -> "Limits":
        """Those of a model's bundle, and what the settings say otherwise."""
        manifest, reference = model.manifest, model.predictor.reference
        confidence = manifest.confidence.thresholds if manifest.confidence else {}
        if settings.confidence is not None:
            confidence = dict.fromkeys(manifest.classes, settings.confidence)
        if reference is None:
            return Limits(confidence, None, None)
        apart = len(reference.disagreement) and settings.disagreement
        return Limits(
            confidence,
            quantile(reference.novelty, 1 - settings.novelty) if settings.novelty else None,
            quantile(reference.disagreement, 1 - settings.disagreement) if apart else None,
        )


class Found(NamedTuple):
    """What there is to say against a tile."""

    doubts: tuple[Doubt, ...]
    disagreement: float | None
    novelty: float | None


class Doubts:
    """Says of each verdict why somebody should look at its image. A tiled frame is doubted for its deciding tile."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: tuple[Model, Limits] | None = None

    @property
    def expected(self) -> float:
        """The share of ordinary images that are doubted for other reasons than confidence."""
        return min(1, self._settings.novelty + self._settings.disagreement)

    def __call__(self, inspection: Inspection) -> Verdict:
        """The verdict with its doubts, its novelty and its encoders' disagreement, as far as the bundle gives them."""
        found = self._of(inspection, inspection.tile, inspection.verdict.label, inspection.verdict.confidence)
        return msgspec.structs.replace(inspection.verdict, **found._asdict())

    def of(self, inspection: Inspection, tile: int) -> tuple[Doubt, ...]:
        """Doubts in a tile as if it were the whole frame."""
        row = inspection.outputs.probabilities[tile]
        return self._of(inspection, tile, inspection.model.manifest.classes[int(row.argmax())], float(row.max())).doubts

    def _of(self, inspection: Inspection, tile: int, label: str, confidence: float) -> Found:
        limits, outputs, part = self._limits(inspection.model), inspection.outputs, slice(tile, tile + 1)
        reference = inspection.model.predictor.reference
        apart = novel = None
        if outputs.opinions is not None and outputs.opinions.shape[1] > 1:
            apart = float(disagreement(outputs.opinions[part])[0])
        if outputs.features is not None and reference is not None:
            novel = float(reference.novel(outputs.features[part])[0])
        found: dict[Doubt, bool] = {
            "confidence": confidence < limits.confidence.get(label, 0),
            "disagreement": _above(apart, limits.disagreement),
            "novelty": _above(novel, limits.novelty),
        }
        return Found(tuple(name for name, doubted in found.items() if doubted), apart, novel)

    def _limits(self, model: Model) -> Limits:
        if self._known is None or self._known[0] is not model:
            self._known = model, Limits.of(model, self._settings)
        return self._known[1]


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit
