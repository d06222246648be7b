"""Tiny bundles that can be told apart by their answers, and stores of them."""

import json
from collections.abc import Sequence
from pathlib import Path

from edge.bundle import bundle_format
from edge.registry.bundle_store import BundleStore
from tests.support.tiny_bundle import CLASSES, tiny_bundle

# the same classes: what one bundle calls red the other calls green
OTHERS = ("green", "blue", "red")


def tiny(folder: Path, round_: int = 1, classes: Sequence[str] = CLASSES) -> Path:
    """A bundle of a round, whose graph's outputs mean `classes`."""
    tiny_bundle(folder, round_=round_)
    path = folder / bundle_format.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"classes": classes}))
    return folder


def stored(folder: Path, *bundles: Path) -> tuple[BundleStore, list[str]]:
    """A store with these bundles, of which the first is served."""
    store = BundleStore(folder)
    digests = [store.add(each, "test") for each in bundles]
    store.record_activation(digests[0], "test", trial=False)
    return store, digests
