"""The classes that folders' images look like to the model in a bundle."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

from broker_config.protocol.errors import UsageError
from edge.bundle.bundle_format import read_bundle
from edge.inference.image_decoding import ImageError
from edge.inference.predictor import Predictor
from trainer.data.folder_scan import Entry, decode_entries

_MAX_IMAGES = 50  # of a folder


def count_votes(bundle: Path, entries: Iterable[Entry], classes: Collection[str]) -> dict[str, Counter[str]]:
    """For each folder, how many of its images look most like each class; of a larger folder a sample is taken.

    Images that cannot be read do not count.

    Raises:
        UsageError: the bundle cannot be used, or has none of the classes.
    """
    predictor = Predictor(read_bundle(bundle))
    known = predictor.manifest.classes
    if not set(known) & set(classes):
        raise UsageError(
            f"the model in {bundle} knows none of the federation's classes, but {', '.join(known)}",
            "pass --like another bundle, or leave it out",
        )
    grouped: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:  # in the order of their digests: the first ones are as good as drawn at random
        grouped[entry.class_name].append(entry)
    votes = {}
    for name, group in grouped.items():
        photos = [photo for _, photo in decode_entries(group[:_MAX_IMAGES]) if not isinstance(photo, ImageError)]
        pixels = [photo.resize(predictor.manifest.input.size) for photo in photos]
        found = predictor.run_one_by_one(np.stack(pixels)).probabilities.argmax(1) if pixels else ()
        votes[name] = Counter(known[best] for best in found)
    return votes
