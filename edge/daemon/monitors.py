"""Those who have a say in a line's verdicts, as its settings want them: doubts, drift, and the images that are kept."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from edge.config.line_settings import Settings
from edge.daemon.prometheus_metrics import Reading
from edge.inference.pipeline import Monitor, Pipeline
from edge.uncertainty.drift import Drift
from edge.uncertainty.image_retention import ImageRetention
from edge.uncertainty.uncertainty_check import Doubts


class Watching:
    """Puts its watchers around those that the line has when this is made: doubts come first, keeping comes last."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._others = pipeline.monitors
        self._now: Settings | None = None
        self._drift: Drift | None = None
        self._keep: ImageRetention | None = None

    def prepare(self, wanted: Settings) -> ImageRetention | None:
        """What will keep images; EdgeNodeError, and nothing has changed, when its folder cannot be used."""
        if self._now and wanted.keep == self._now.keep:
            return self._keep
        return ImageRetention(wanted.keep) if wanted.keep else None

    def abandon(self, keep: ImageRetention | None) -> None:
        """Let go of what was prepared."""
        if keep and keep is not self._keep:
            keep.close()

    async def exchange(self, wanted: Settings, keep: ImageRetention | None) -> None:
        """Use them, for the frames to come."""
        now, old, drift = self._now, self._keep, self._drift
        if now is None or (now.doubt, now.drift) != (wanted.doubt, wanted.drift):
            self._drift = (
                Drift(wanted.drift, Doubts(wanted.doubt), self._pipeline.outbox) if wanted.drift.window else None
            )
        self._keep, self._now = keep, wanted
        before: list[Monitor] = [Doubts(wanted.doubt)]
        if self._drift:
            before.append(self._drift)
        self._pipeline.monitors = (*before, *self._others, *([keep] if keep else []))
        if old is not keep or drift is not self._drift:
            await self._pipeline.ping()  # the worker has let go of them
        if old and old is not keep:
            old.close()
        if drift and drift is not self._drift:
            drift.end("the settings have changed: drift is measured anew")

    def close(self) -> None:
        """Write what is still to be kept."""
        if self._keep:
            self._keep.close()

    def readings(self) -> Iterator[Reading]:
        """How it goes, for Prometheus."""
        if drift := self._drift:
            gauge = GaugeMetricFamily
            yield Reading(gauge, "drifted", "1 while there is an alarm about drift", drift.drifted)
            yield Reading(gauge, "drift_limit_ratio", "How far features have strayed, in control limits", drift.level)
            text = "How many more are in doubt than expected, in control limits"
            yield Reading(gauge, "doubt_limit_ratio", text, drift.excess)
            yield Reading(gauge, "doubtful_ratio", "Share of images in doubt of late", drift.doubtful)
        if keep := self._keep:
            text = "Images that should have been kept and were not"
            yield Reading(CounterMetricFamily, "images_lost", text, keep.lost)
