"""Drift: whether what the line sees is still what the model's held-out images are.

Each image's features, standardised within the class that the model takes it for, go into an exponentially weighted
moving average. While nothing has changed its mean square is a scaled chi-square, whose scale follows from the window
and from how few the held-out images were, and whose degrees of freedom from how their features hang together
(Satterthwaite 1946). Classes in other shares are no drift; doubts in other shares are. Of a tiled frame one tile
counts, drawn at random.
"""

import math
import random
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from edge.bundle.bundle_format import Manifest
from edge.inference.pipeline import Inspection, Outbox
from edge.inference.served_model import Model
from edge.inference.verdict import Notice, Verdict, current_time, new_id
from edge.uncertainty.reference import Floats, Reference
from edge.uncertainty.uncertainty_check import Doubts

_SIGMAS = 6.0  # of the control limits: on tuning images 4.5 gave false alarms, features and doubts have heavy tails
_CLEAR = 0.6  # of the limit, below which an alarm ends
_FEWEST = 0.02  # share of doubts that is always expected


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[drift]` of a line's settings."""

    window: Annotated[int, Meta(ge=0)] = 200  # images that the averages amount to; 0: drift is not watched
    tolerance: Annotated[float, Meta(gt=0)] = 1.0  # by which the control limits are multiplied


class Drift:
    """Compares what the line sees with its model's held-out images, and raises an alarm that it also ends.

    Needs a bundle with a reference; without one all values stay as they are at the start. The attributes may be read
    from any thread.
    """

    def __init__(self, settings: Settings, doubts: Doubts, outbox: Outbox) -> None:
        """`doubts` are those that the line's verdicts get."""
        self._settings, self._doubts, self._outbox = settings, doubts, outbox
        self._random = random.Random(0)
        self.drifted = False
        self._start_anew(None)

    def _start_anew(self, model: Model | None) -> None:
        self.level = 0.0  # of the features, in control limits: above 1 they have drifted
        self.doubtful = 0.0  # share of images in doubt
        self.excess = 0.0  # of doubts, in control limits
        self.shares: dict[str, float] = {}  # of the classes
        self._model = model
        reference = model.predictor.reference if model else None
        self._average = _Average(2 / (self._settings.window + 1), reference.means.shape) if reference else None
        self._wait = self._settings.window // 2  # images until an alarm may begin or end

    def __call__(self, inspection: Inspection) -> Verdict:
        """The verdict as it is."""
        if inspection.model is not self._model:
            self.end("the model has changed: drift is measured anew")
            self._start_anew(inspection.model)
        reference = inspection.model.predictor.reference
        if self._average and reference and inspection.outputs.features is not None:
            tiles = len(inspection.outputs.probabilities)
            tile = self._random.randrange(tiles)  # the one that decides is the oddest of all
            doubts = self._doubts.of(inspection, tile) if tiles > 1 else inspection.verdict.doubts
            taken = int(inspection.outputs.probabilities[tile].argmax())
            self._average.add(reference.standardised(inspection.outputs.features[tile], taken), taken, bool(doubts))
            self._measure(self._average, reference, inspection.model.manifest)
            self._decide()
        return inspection.verdict

    def end(self, why: str) -> None:
        """End the alarm, if there is one, since what it was about is measured no more."""
        if self.drifted:
            self._tell(False, why)

    def _measure(self, average: "_Average", reference: Reference, manifest: Manifest) -> None:
        variance = average.squares / average.weight**2  # of an average of independent values of variance 1
        shares = average.classes / average.weight
        strayed = float(average.features @ average.features) / len(average.features) / average.weight**2
        limit = reference.expected(shares, variance) * _upper(reference.freedom)
        self.level = strayed / limit / self._settings.tolerance
        self.shares = dict(zip(manifest.classes, shares.tolist(), strict=True))
        self.doubtful = average.doubts / average.weight
        usual = max(_FEWEST, self._doubts.expected + (1 - manifest.confidence.coverage if manifest.confidence else 0))
        deviation = math.sqrt(max(0, usual * (1 - usual)) * (variance + 1 / int(reference.counts.sum()))) or 1
        self.excess = (self.doubtful - usual) / (_SIGMAS * deviation) / self._settings.tolerance

    def _decide(self) -> None:
        """Raise or end the alarm, and leave it at that for a window."""
        self._wait -= 1
        if self._wait >= 0:
            return
        worst = max(self.level, self.excess)
        if not self.drifted and worst > 1:
            what = "images look otherwise" if self.level > self.excess else "more verdicts are in doubt"
            self._tell(True, f"{what} than on the model's held-out images: look at the camera, the light, the material")
        elif self.drifted and worst < _CLEAR:
            self._tell(False, "images look as the model's held-out images again")

    def _tell(self, drifted: bool, text: str) -> None:
        self.drifted, self._wait = drifted, self._settings.window
        details: dict[str, float | str] = {
            "state": "drifted" if drifted else "ordinary",
            "level": round(self.level, 3),
            "doubtful": round(self.doubtful, 4),
            "excess": round(self.excess, 3),
        }
        self._outbox.put(Notice(kind="drift", text=text, time=current_time(), details=details, id=new_id()))


class _Average:
    """Exponentially weighted sums; divided by `weight` they are averages, also of the first few images."""

    def __init__(self, step: float, shape: tuple[int, ...]) -> None:
        """`step`: weight of the newest image; `shape`: classes, features."""
        self._step = step
        self.features, self.classes = np.zeros(shape[1], np.float32), np.zeros(shape[0], np.float32)
        self.doubts = self.weight = self.squares = 0.0  # squares: of the weights

    def add(self, features: Floats, taken: int, doubted: bool) -> None:
        """Count an image that was taken for a class."""
        keep = 1 - self._step
        self.features *= keep
        self.features += self._step * features
        self.classes *= keep
        self.classes[taken] += self._step
        self.doubts = keep * self.doubts + self._step * doubted
        self.weight = keep * self.weight + self._step
        self.squares = keep**2 * self.squares + self._step**2


def _upper(freedom: float) -> float:
    """The control limit of a chi-square divided by its degrees of freedom (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * max(freedom, 1))
    return float((1 - spread + _SIGMAS * math.sqrt(spread)) ** 3)
