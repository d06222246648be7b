"""Comparison of a plant's candidates for deployment: trained alone, together with others,
and both mixed.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

CandidateName = Literal["alone", "together", "mixed"]
Share = Annotated[float, Meta(ge=0, le=1)]
Difference = Annotated[float, Meta(ge=-1, le=1)]
FEW = 10  # images, below which an interval says little


class Candidate(Struct, frozen=True, kw_only=True):
    """Accuracy of one candidate on images of the plant's own classes, with its 95 % interval."""

    accuracy: Share
    low: Share
    high: Share
    gain: Difference = 0.0  # over the one that was trained alone, on the same images
    gain_low: Difference = 0.0  # 95 % interval of the paired difference
    gain_high: Difference = 0.0


class TrainingGain(Struct, frozen=True, kw_only=True):
    """What training has added to the model of a federation's first sums,
    on images that neither has seen.
    """

    images: Annotated[int, Meta(ge=0)]  # 0: none could be held out
    first: Share = 0.0  # accuracy of the model of the first sums
    trained: Share = 0.0
    low: Difference = 0.0  # 95 % interval of the paired difference
    high: Difference = 0.0
    is_shown: bool = False  # whether it is shown: then the trained model is deployed

    def describe(self) -> str:
        """Return whether training paid, as a sentence."""
        if not self.images:
            return (
                "no image could be held out to judge training: the model of the first sums is "
                "deployed"
            )
        change = 100 * (self.trained - self.first)
        measured = (
            f"{change:+.0f} points ({100 * self.low:+.0f} to {100 * self.high:+.0f}) on "
            f"{self.images} held-out images"
        )
        if self.is_shown:
            return f"training added {measured}: the trained model is deployed"
        return (
            f"training changed accuracy by {measured}, which does not show that it pays: the "
            "model of the first sums is deployed"
        )


class Comparison(Struct, frozen=True, kw_only=True):
    """What joining was worth to one plant: its candidates on the same images,
    none of which trained them.

    They are judged as a line judges by default: all classes are candidates, those that the plant
    never taught at less weight (`edge.inference.class_prior`).
    """

    images: Annotated[int, Meta(ge=1)]
    # whether each image was left out of the model that predicts it, instead of held out from all
    cross_validated: bool = False
    guessing: Share  # accuracy of naming always the commonest of these images' classes
    alone: Candidate
    together: Candidate
    mixed: Candidate
    deployed: CandidateName
    # Accuracy among own classes during training, from which to which it fell; None if it has not.
    fall: tuple[Share, Share] | None = None
    # over the model of the first sums, where the federation has trained after these
    training: TrainingGain | None = None

    @property
    def chosen(self) -> Candidate:
        """What is deployed."""
        candidate: Candidate = getattr(self, self.deployed)
        return candidate

    def describe(self) -> str:
        """The candidates, and which is deployed, as a sentence."""
        compared: CandidateName = "together" if self.deployed == "alone" else self.deployed
        shown = [f"alone {_percent(self.alone.accuracy)}"]
        for name in ("together", "mixed"):
            candidate: Candidate = getattr(self, name)
            difference = f" ({_describe_gain(candidate)})" if name == compared else ""
            shown.append(f"{name} {_percent(candidate.accuracy)}{difference}")
        how = "images, each left out in turn" if self.cross_validated else "held-out images"
        return (
            f"on {self.images} {how}: {', '.join(shown)}, guessing "
            f"{_percent(self.guessing)}: {self.deployed} is deployed"
        )

    def warnings(self) -> list[str]:
        """What a person should know before the model is served, each with a remedy."""
        found = []
        deployed = self.chosen
        if deployed.low <= self.guessing:
            found.append(
                f"{_percent(deployed.accuracy)} of {self.images} images "
                f"({_percent(deployed.low)} to {_percent(deployed.high)}) can hardly be told "
                f"from guessing ({_percent(self.guessing)}): label more images before it decides "
                "anything"
            )
        if self.images < FEW:
            found.append(
                f"only {self.images} images judged the model: label more, or bring --test FOLDER"
            )
        if self.fall is not None:
            before, after = self.fall
            found.append(
                f"accuracy fell during training, from {_percent(before)} to {_percent(after)}: "
                "fewer --rounds, a smaller --training learning_rate or more images may help"
            )
        return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _describe_gain(candidate: Candidate) -> str:
    """The interval of a gain over training alone, in points."""
    low = round(100 * candidate.gain_low)
    high = round(100 * candidate.gain_high)
    if low >= 0:
        return f"{low} to {high} points more than alone"
    if high <= 0:
        return f"{-high} to {-low} points fewer than alone"
    return f"from {-low} points fewer than alone to {high} more"
