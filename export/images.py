"""The images behind a personal model: those that trained it, and those that judged it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from broker_config.errors import UsageError
from edge.images import decode
from trainer import data, personal
from trainer.data import LabelledImages
from trainer.personal import Facts, Sample, Verdict


class Album:
    """Finds images where the model says that they are, else by their content in `folder`, a plant's class folders."""

    def __init__(self, folder: Path | None = None):
        entries = data.survey(folder).entries if folder else ()
        self._elsewhere = {entry.digest: entry.path for entry in entries}

    def training(self, source: Path, facts: Facts) -> LabelledImages:
        """The images that trained the model in `source`.

        Raises:
            UsageError: none is there any more, or the model does not say which they are.
        """
        found = self._find(personal.load_training(source), facts)
        if found is None:
            raise UsageError(
                f"none of the images that trained the model in {source} is where it was",
                "name their folder with --data",
            )
        return found

    def held_out(self, source: Path, facts: Facts) -> LabelledImages | None:
        """The images that judged the model in `source` and have not trained it; None when there are none any more."""
        if facts.metrics.get("cross_validated", 1):
            return None
        return self._find(personal.load_verdicts(source), facts)

    def _find(self, listed: Sequence[Sample | Verdict], facts: Facts) -> LabelledImages | None:
        found = [(each, path) for each in listed if (path := self._path(each))]
        if not found:
            return None
        return LabelledImages(
            np.stack([decode(path, facts.preprocessing.size) for _, path in found]),
            np.array([facts.classes.index(each.label) for each, _ in found], np.int64),
            tuple(each.digest for each, _ in found),
            tuple(path for _, path in found),
        )

    def _path(self, image: Sample | Verdict) -> Path | None:
        path = Path(image.path)
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() == image.digest:
                return path
        except OSError:
            pass  # it has been moved, perhaps to the album's folder
        return self._elsewhere.get(image.digest)
