"""Demands that the kernel checks itself: of sums, masks, privacy,
and of what nodes see of one another.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from trainer import progress
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation import masking
from trainer.federation.client.plant_checks import PlantCheck
from trainer.methods.base import Method
from trainer.training.privacy_plan import planned_epsilon


class SumsCheck(PlantCheck, frozen=True):
    """Demands of sums, before the plant's own leave it."""

    remedy = "demand images=N or nodes=N"

    # of its own of each of its classes, look-alikes counting as one
    images: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    nodes: Annotated[int, Meta(ge=1)] | UnsetType = UNSET  # whose sums a total holds

    def check_spec(self, spec: Spec, method: Method) -> None:
        """Check that the federation has sums."""
        if not method.statistics:
            raise _uncheckable(
                self.demanded,
                "demand images or nodes where sums are exchanged; how many plants have a class is "
                "known when their sums are there",
            )

    def check_images(
        self,
        spec: Spec,
        images: Images,
        report: progress.Report,
        stop: Callable[[], bool],
    ) -> None:
        """Check that sums are of enough images, and of enough nodes."""
        if unmet := self._unmet(images.train, spec):
            raise UsageError(
                f"the sums of federation {spec.federation!r} would tell more of this plant's "
                f"images than it demands: it lacks {unmet}",
                "label more images, leave the class's folder out, ask the coordinator for a larger "
                "--quorum, or demand less here (--demand)",
            )

    def _unmet(self, images: LabelledImages, spec: Spec) -> str:
        unmet = []
        if self.images is not UNSET:
            labels = [int(images.labels[group[0]]) for group in images.sets]
            present = sorted(set(labels))
            few = [spec.classes[label] for label in present if labels.count(label) < self.images]
            if few:
                unmet.append(
                    f"{self.images} images of {', '.join(few)}, look-alikes counting as one"
                )
        if self.nodes is not UNSET and spec.quorum < self.nodes:
            unmet.append(f"a quorum of {self.nodes} nodes (it is {spec.quorum})")
        return "; ".join(unmet)


class MasksCheck(PlantCheck, frozen=True):
    """A demand of masks."""

    remedy = "demand masked=N"

    # contributions in a sum of which nobody can read one
    masked: Annotated[int, Meta(ge=0)] | UnsetType = UNSET

    def check_spec(self, spec: Spec, method: Method) -> None:
        """Check that contributions are read in sums of enough nodes."""
        if self.masked is not UNSET and spec.mask_threshold < self.masked:
            raise UsageError(
                f"what this plant contributes to federation {spec.federation!r} can be read by "
                f"itself, or in a sum of fewer than the {self.masked} that it demands (it is "
                f"{spec.mask_threshold})",
                "ask its coordinator for a run with --secure-aggregation of "
                f"{masking.least_nodes(self.masked)} nodes or more, or demand less here (--demand)",
            )


class EpsilonCheck(PlantCheck, frozen=True):
    """A demand of a private federation."""

    remedy = "demand for example epsilon=3"

    # that is spent of each image, with what was spent before
    epsilon: Annotated[float, Meta(gt=0)] | UnsetType = UNSET

    @property
    def most_epsilon(self) -> float:
        """The epsilon that the plant demands."""
        return inf if self.epsilon is UNSET else self.epsilon

    def check_spec(self, spec: Spec, method: Method) -> None:
        """Check that the federation is private, and plans to spend no more."""
        if spec.privacy is None:
            raise UsageError(
                f"federation {spec.federation!r} is not private: no epsilon bounds what leaves "
                "this plant",
                "ask its coordinator for edge-node coordinate --privacy epsilon=3, or leave out "
                "--demand epsilon",
            )
        planned = planned_epsilon(spec)
        if not planned <= self.most_epsilon:  # also what is no number
            raise UsageError(
                f"federation {spec.federation!r} would spend epsilon {planned:.3g} of this "
                f"plant's images, and it demands {self.most_epsilon:.3g} at most",
                "ask its coordinator for more noise (--privacy), or demand less here (--demand)",
            )


class RelayCheck(PlantCheck, frozen=True):
    """Demands of what hides images in what other nodes see of them."""

    remedy = "demand noise=S, levels=N or mix=N"

    noise: float | UnsetType = UNSET
    levels: int | UnsetType = UNSET
    mix: int | UnsetType = UNSET

    def check_spec(self, spec: Spec, method: Method) -> None:
        """Check how the federation protects what nodes pass on to one another."""
        if method.relay is None:
            raise _uncheckable(
                self.demanded, "demand noise, levels or mix where patches are exchanged"
            )
        if unmet := method.relay.unmet_demands(self.demanded):
            raise UsageError(
                f"federation {spec.federation!r} hides less in what others see of this plant's "
                f"images than it demands: it lacks {unmet}",
                "ask its coordinator for such --option, or demand less here (--demand)",
            )


def _uncheckable(names: Iterable[str], remedy: str) -> UsageError:
    return UsageError(
        "what this node demands cannot be checked before anything leaves it: " + ", ".join(names),
        remedy,
    )
