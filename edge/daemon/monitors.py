"""Monitors of a line's verdicts, according to its settings: doubts, drift,
and the images that are kept.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from edge.daemon.line_settings import Settings
from edge.http.prometheus_metrics import Reading
from edge.inference.pipeline import Monitor, Pipeline
from edge.uncertainty.drift import Drift
from edge.uncertainty.image_retention import ImageRetention
from edge.uncertainty.model_warnings import line_warnings
from edge.uncertainty.performance import held_out_performance
from edge.uncertainty.uncertainty_check import UncertaintyCheck


class Monitors:
    """Puts its monitors around those that the pipeline has at construction:
    doubts come first, image retention last.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._others = pipeline.monitors
        self._current: Settings | None = None
        self._drift: Drift | None = None
        self._keep: ImageRetention | None = None

    def prepare(self, wanted: Settings) -> ImageRetention | None:
        """The image retention of these settings; EdgeNodeError when its folder cannot be used."""
        if self._current and wanted.keep == self._current.keep:
            return self._keep
        return ImageRetention(wanted.keep) if wanted.keep else None

    def discard(self, keep: ImageRetention | None) -> None:
        """Close what was prepared."""
        if keep and keep is not self._keep:
            keep.close()

    async def apply(self, wanted: Settings, keep: ImageRetention | None) -> None:
        """Switch to these settings for the frames to come."""
        current = self._current
        old = self._keep
        drift = self._drift
        if current is None or _drift_basis(current) != _drift_basis(wanted):
            self._drift = (
                Drift(wanted.drift, UncertaintyCheck(wanted.doubt), self._pipeline.outcomes)
                if wanted.drift.window
                else None
            )
        self._keep = keep
        self._current = wanted
        before: list[Monitor] = [UncertaintyCheck(wanted.doubt)]
        if self._drift:
            before.append(self._drift)
        keeping = [keep] if keep else []
        self._pipeline.monitors = (*before, *self._others, *keeping)
        if old is not keep or drift is not self._drift:
            await self._pipeline.ping()  # the worker no longer uses them
        if old and old is not keep:
            old.close()
        if drift and drift is not self._drift:
            drift.end_alarm("the settings have changed: drift is measured anew")

    @property
    def drift(self) -> Drift | None:
        """Drift as it is measured now; None where the settings want none."""
        return self._drift

    @property
    def retention(self) -> ImageRetention | None:
        """What keeps images now; None where the settings want none kept."""
        return self._keep

    def close(self) -> None:
        """Write the images that are still to be kept."""
        if self._keep:
            self._keep.close()

    def readings(self) -> Iterator[Reading]:
        """Drift, doubt, lost images, and what the model's held-out images tell of it
        and give reason to warn of, for Prometheus.
        """
        if found := held_out_performance(
            self._pipeline.model.manifest, self._pipeline.view, self._pipeline.prior
        ):
            for name, text, share in (
                (
                    "model_accuracy_ratio",
                    "Share of the model's held-out images that it classifies right",
                    found.accuracy,
                ),
                (
                    "model_missed_ratio",
                    "Share of those with a defect that it calls good",
                    found.missed,
                ),
                (
                    "model_false_reject_ratio",
                    "Share of those without a defect that it calls defective",
                    found.false_rejects,
                ),
            ):
                if share:
                    yield Reading(GaugeMetricFamily, name, text, share.share)
        for warning in line_warnings(
            self._pipeline.model, self._pipeline.view, self._pipeline.prior
        ):
            text = "1 for each warning about the model that is served"
            labels = {"warning": warning.id}
            yield Reading(GaugeMetricFamily, "model_warning", text, 1, labels)
        if drift := self._drift:
            gauge = GaugeMetricFamily
            yield Reading(gauge, "drifted", "1 while there is an alarm about drift", drift.drifted)
            yield Reading(
                gauge,
                "drift_limit_ratio",
                "How far features have strayed, in control limits",
                drift.level,
            )
            text = "How many more are in doubt than expected, in control limits"
            yield Reading(gauge, "doubt_limit_ratio", text, drift.excess)
            yield Reading(
                gauge, "doubtful_ratio", "Share of images in doubt of late", drift.doubtful
            )
        if keep := self._keep:
            text = "Images that should have been kept and were not"
            yield Reading(CounterMetricFamily, "images_lost", text, keep.lost)


def _drift_basis(settings: Settings) -> tuple[object, ...]:
    """The tables on which drift, and what counts as doubted or of a class, depends."""
    return settings.doubt, settings.drift, settings.prior
