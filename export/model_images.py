"""The images behind a personal model: those that trained it, and those that were held out."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import UsageError
from broker_config.storage import checksums
from edge.inference.image_decoding import decode_image
from trainer.data.class_folders import LabelledImages
from trainer.data.folder_scan import scan_folder
from trainer.training import personal_model
from trainer.training.personal_model import HeldOutPrediction, ModelMetadata, TrainingImage


class ImageFinder:
    """Finds images where the model says that they are, else by their content in `folder`,
    a plant's class folders.
    """

    def __init__(self, folder: Path | None = None):
        entries = scan_folder(folder).entries if folder else ()
        self._elsewhere = {entry.digest: entry.path for entry in entries}

    def training(self, source: Path, metadata: ModelMetadata) -> LabelledImages:
        """The images that trained the model in `source`.

        Raises:
            UsageError: none is there any more, or the model does not say which they are.
        """
        found = self.find(personal_model.load_training_images(source), metadata)
        if found is None:
            raise UsageError(
                f"none of the images that trained the model in {source} is where it was",
                "name their folder with --data",
            )
        return found

    def find(
        self, listed: Sequence[TrainingImage | HeldOutPrediction], metadata: ModelMetadata
    ) -> LabelledImages | None:
        """Those images that are still there, the same byte for byte; None if none is."""
        found = []
        for each in listed:
            for path, pixels in self._read(each, metadata):
                found.append((each, path, pixels))
        if not found:
            return None
        return LabelledImages(
            np.stack([pixels for _, _, pixels in found]),
            np.array([metadata.classes.index(each.label) for each, _, _ in found], np.int64),
            tuple(each.digest for each, _, _ in found),
            tuple(path for _, path, _ in found),
        )

    def _read(
        self, image: TrainingImage | HeldOutPrediction, metadata: ModelMetadata
    ) -> Iterator[tuple[Path, NDArray[np.uint8]]]:
        for path in filter(None, (Path(image.path), self._elsewhere.get(image.digest))):
            # it has been moved, perhaps to the finder's folder
            content = checksums.read_unchanged(path, image.digest)
            if content is not None:
                with suppress(UsageError):
                    yield path, decode_image(content, metadata.preprocessing.size)
                return
