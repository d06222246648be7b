"""The classes that folders' images look like to the model in a bundle."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from broker_config.protocol.errors import UsageError
from edge.bundle.bundle_format import read_bundle
from edge.inference.image_decoding import ImageError
from edge.inference.predictor import Predictor
from trainer.data.folder_scan import Entry, decode_entries

_MAX_IMAGES = 50  # of a folder


def count_votes(
    bundle: Path, entries: Iterable[Entry], classes: Collection[str]
) -> dict[str, Counter[str]]:
    """For each folder, how many of its images look most like each class;
    of a larger folder a sample is taken.

    Images that cannot be read do not count. A model that does not know this plant's camera may take
    everything for one class. Votes for a class that a folder of another class, or more than half of
    all folders, get too mean nothing, and are left out.

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
    # in the order of their digests: the first ones are as good as drawn at random
    for entry in entries:
        grouped[entry.class_name].append(entry)
    votes = {}
    for name, group in grouped.items():
        photos = [
            photo
            for _, photo in decode_entries(group[:_MAX_IMAGES])
            if not isinstance(photo, ImageError)
        ]
        pixels = [photo.resize(predictor.manifest.input.size) for photo in photos]
        found = predictor.run_one_by_one(np.stack(pixels)).probabilities.argmax(1) if pixels else ()
        votes[name] = Counter(known[best] for best in found)
    most = {name: counts.most_common(1)[0][0] for name, counts in votes.items() if counts}
    seen: dict[str, Counter[str]] = {}
    for class_name, counts in votes.items():
        seen[class_name] = Counter() if _is_blind(class_name, most, classes) else counts
    return seen


def _is_blind(name: str, most: Mapping[str, str], classes: Collection[str]) -> bool:
    """Whether the class that most images of a folder look like tells nothing.

    `most` has it for all folders.
    """
    alike = [other for other, looks in most.items() if other != name and looks == most.get(name)]
    return any(other in classes and other != most[name] for other in alike) or (
        bool(alike) and 2 * (len(alike) + 1) > len(most)
    )
