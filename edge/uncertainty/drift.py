"""Drift detection: a comparison of a line's images with the model's held-out images.

Each image's features, standardised within its predicted class, enter an exponentially weighted
moving average. While nothing has changed, its mean square is a scaled chi-square; the scale follows
from the window and the number of held-out images, the degrees of freedom from the correlation of
their features (Satterthwaite 1946). A change in the shares of the classes is not drift; a change in
the share of doubted verdicts is. Of a tiled frame one random tile counts.
"""

import math
import random
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from edge.bundle.bundle_format import Manifest
from edge.bundle.reference import Floats, Reference
from edge.inference.outcomes import Notice, Verdict, current_time, new_id
from edge.inference.pipeline import Inspection, OutcomeConsumer
from edge.inference.served_model import Model
from edge.uncertainty.uncertainty_check import UncertaintyCheck

# of the control limits; 4.5 gave false alarms on tuning images: features and doubts have heavy
# tails
_SIGMAS = 6.0
_CLEAR = 0.6  # share of the limit below which an alarm ends
_MIN_SHARE = 0.02  # of doubted verdicts that is always to be expected


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[drift]` of a line's settings."""

    # images over which averages are taken; 0: no drift detection
    window: Annotated[int, Meta(ge=0)] = 200
    tolerance: Annotated[float, Meta(gt=0)] = 1.0  # factor on the control limits


class Drift:
    """The monitor that compares a line's images with its model's held-out images,
    and raises and ends an alarm.

    It needs a bundle with a reference; without one all values keep their initial state. The
    attributes may be read from any thread.
    """

    def __init__(
        self, settings: Settings, check: UncertaintyCheck, outcomes: OutcomeConsumer
    ) -> None:
        """`check` is the one that is applied to the line's verdicts."""
        self._settings = settings
        self._check = check
        self._outcomes = outcomes
        self._random = random.Random(0)
        self.drifted = False
        self._reset(None)

    def _reset(self, model: Model | None) -> None:
        self.level = 0.0  # of the features, in control limits: above 1 they have drifted
        self.doubtful = 0.0  # share of doubted verdicts
        self.excess = 0.0  # of doubted verdicts beyond the expected share, in control limits
        self.shares: dict[str, float] = {}  # of the classes
        self._model = model
        reference = model.predictor.reference if model else None
        self._average = (
            _Average(2 / (self._settings.window + 1), reference.means.shape) if reference else None
        )
        self._wait = self._settings.window // 2  # images until an alarm may begin or end

    def __call__(self, inspection: Inspection) -> Verdict:
        """Count an inspection; return its verdict unchanged."""
        if inspection.model is not self._model:
            self.end_alarm("the model has changed: drift is measured anew")
            self._reset(inspection.model)
        reference = inspection.model.predictor.reference
        if self._average and reference and inspection.outputs.features is not None:
            tiles = len(inspection.probabilities)
            tile = self._random.randrange(tiles)  # the deciding tile is the least ordinary one
            doubts: Sequence[str] = inspection.verdict.doubts
            if tiles > 1 and "blank" not in doubts:
                doubts = self._check.doubts_of_tile(inspection, tile)
            label = int(inspection.probabilities[tile].argmax())
            self._average.add(
                reference.standardised(inspection.outputs.features[tile], label),
                label,
                bool(doubts),
            )
            self._measure(self._average, reference, inspection.model.manifest)
            self._update_alarm()
        return inspection.verdict

    def end_alarm(self, why: str) -> None:
        """End the alarm, if there is one, because its subject is no longer measured."""
        if self.drifted:
            self._notify(False, why)

    def _measure(self, average: "_Average", reference: Reference, manifest: Manifest) -> None:
        # of an average of independent values of variance 1
        variance = average.squares / average.weight**2
        shares = average.classes / average.weight
        strayed = (
            float(average.features @ average.features) / len(average.features) / average.weight**2
        )
        limit = reference.expected_square(shares, variance) * _control_limit(reference.freedom)
        self.level = strayed / limit / self._settings.tolerance
        self.shares = dict(zip(manifest.classes, shares.tolist(), strict=True))
        self.doubtful = average.doubts / average.weight
        coverage = 1 - manifest.confidence.coverage if manifest.confidence else 0
        usual = max(
            _MIN_SHARE,
            self._check.expected_share + coverage,
        )
        deviation = (
            math.sqrt(max(0, usual * (1 - usual)) * (variance + 1 / int(reference.counts.sum())))
            or 1
        )
        self.excess = (self.doubtful - usual) / (_SIGMAS * deviation) / self._settings.tolerance

    def _update_alarm(self) -> None:
        """Raise or end the alarm, then leave it unchanged for a window."""
        self._wait -= 1
        if self._wait >= 0:
            return
        worst = max(self.level, self.excess)
        if not self.drifted and worst > 1:
            what = (
                "images look otherwise"
                if self.level > self.excess
                else "more verdicts are in doubt"
            )
            self._notify(
                True,
                f"{what} than on the model's held-out images: look at the camera, the light, the "
                "material",
            )
        elif self.drifted and worst < _CLEAR:
            self._notify(False, "images look as the model's held-out images again")

    def _notify(self, drifted: bool, text: str) -> None:
        self.drifted = drifted
        self._wait = self._settings.window
        state = "drifted" if drifted else "ordinary"
        details: dict[str, float | str] = {
            "state": state,
            "level": round(self.level, 3),
            "doubtful": round(self.doubtful, 4),
            "excess": round(self.excess, 3),
        }
        self._outcomes.put(
            Notice(kind="drift", text=text, time=current_time(), details=details, id=new_id())
        )


class _Average:
    """Exponentially weighted sums; divided by `weight` they are averages,
    even of the first few images.
    """

    def __init__(self, step: float, shape: tuple[int, ...]) -> None:
        """`step`: weight of the newest image; `shape`: classes, features."""
        self._step = step
        self.features = np.zeros(shape[1], np.float32)
        self.classes = np.zeros(shape[0], np.float32)
        self.doubts = self.weight = self.squares = 0.0  # squares: of the weights

    def add(self, features: Floats, label: int, doubted: bool) -> None:
        """Count an image with its predicted class."""
        keep = 1 - self._step
        self.features *= keep
        self.features += self._step * features
        self.classes *= keep
        self.classes[label] += self._step
        self.doubts = keep * self.doubts + self._step * doubted
        self.weight = keep * self.weight + self._step
        self.squares = keep**2 * self.squares + self._step**2


def _control_limit(freedom: float) -> float:
    """The control limit of a chi-square divided by its degrees of freedom
    (Wilson and Hilferty 1931).
    """
    spread = 2 / (9 * max(freedom, 1))
    return float((1 - spread + _SIGMAS * math.sqrt(spread)) ** 3)
