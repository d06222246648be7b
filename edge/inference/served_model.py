"""The model that a line serves: its predictor, when it expires, and loading it from a bundle."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge.bundle import bundle_format
from edge.bundle.expiry import UNCHECKED, ExpiryDates
from edge.inference import native_memory
from edge.inference.predictor import Predictor

if TYPE_CHECKING:
    # only a line with a trust file takes the time to load cryptography
    from edge.bundle.verification import Verifier

_log = logging.getLogger(__name__)


class Model(NamedTuple):
    """What a line serves at one moment. Exchanged as a whole, so no answer mixes two models."""

    predictor: Predictor
    expiry_dates: ExpiryDates = UNCHECKED
    digest: str = ""  # of the manifest, the first 12 hexadecimal digits

    @classmethod
    def from_bundle(
        cls, bundle: bundle_format.Bundle, threads: int, expiry_dates: ExpiryDates = UNCHECKED
    ) -> "Model":
        """Load a bundle whose files are known to be intact;
        BundleError when it fails its self-test.
        """
        predictor = Predictor(bundle, threads)
        predictor.self_test()
        native_memory.trim_heap()
        return cls(predictor, expiry_dates, bundle.digest[:12])

    @property
    def manifest(self) -> bundle_format.Manifest:
        """The bundle's manifest."""
        return self.predictor.manifest


def load_model(
    folder: Path,
    verifier: "Verifier | None" = None,
    threads: int = 0,
    try_first: Callable[[bundle_format.Bundle], None] | None = None,
) -> Model:
    """Load a bundle that `verifier` admits; without a verifier no signature is checked.

    `try_first` gets the bundle once it is admitted, before its graph computes here. Raises
    EdgeNodeError when the bundle cannot be used; with a verifier, as `Verifier.admit` does.
    """
    if verifier is None:
        if (folder / bundle_format.SIGNATURE).exists():
            _log.warning("%s is signed, but its signature is not checked without --trust", folder)
        found = bundle_format.read_bundle(folder)
        if try_first:
            try_first(found)
        return Model.from_bundle(found, threads)
    with verifier.admit(folder) as admitted:
        if others := bundle_format.unlisted_files(folder, admitted.bundle.manifest):
            _log.warning(
                "%s holds more than the bundle (%r, %d in all): nobody signed that, nothing "
                "uses it",
                folder,
                others[0],
                len(others),
            )
        if try_first:
            try_first(admitted.bundle)
        return Model.from_bundle(admitted.bundle, threads, admitted.expiry_dates)
