"""Reload of a newer bundle in the folder of the one that is served:
loaded and tested beside it, then handed over.
"""

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

from broker_config.protocol.errors import EdgeNodeError
from edge.bundle.bundle_format import load_manifest

_log = logging.getLogger(__name__)

_EVERY = 1.0  # seconds between two checks of the folder
_TRIES = 5  # to load a bundle before a warning: it may be on its way into the folder

Model = TypeVar("Model")


class NewModel(NamedTuple, Generic[Model]):
    """A newer model, ready."""

    model: Model


class BundleReloader(Generic[Model]):
    """Puts a `NewModel` into an inbox whenever the folder holds another bundle that can be
    served.
    """

    def __init__(self, folder: Path, load: Callable[[Path], Model], inbox: queue.Queue[Any]):
        self._folder = folder
        self._load = load
        self._inbox = inbox
        self._seen = b""
        self._failed = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)

    def load_first(self) -> Model:
        """The model that is there now; BundleError if there is none that can be served."""
        content = load_manifest(self._folder)
        model = self._load(self._folder)
        self._seen = content
        return model

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(_EVERY):
            self._check()

    def _check(self) -> None:
        try:
            content = load_manifest(self._folder)
            if content == self._seen:
                return
            self._inbox.put(NewModel(self._load(self._folder)))
        except EdgeNodeError as error:
            self._failed += 1
            if self._failed == _TRIES:
                _log.warning("a newer bundle is not served, the last one is: %s", error)
        else:
            self._seen = content
            self._failed = 0
