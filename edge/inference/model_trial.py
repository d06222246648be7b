"""Trial of a model before it is loaded where frames are judged.

A graph is a program: it may compute for ever, or ask for more memory than there is. Whoever can
write a bundle, or holds a node's key, could stop the line with one. So a candidate first loads and
computes in a process of its own, which has limits of time and memory: its golden image, then the
images by which it is judged.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from broker_config.protocol.errors import explain
from edge.bundle.bundle_format import Bundle, BundleError, read_bundle
from edge.inference.worker_process import WorkerEndedError, WorkerProcesses

_LOADING = 60.0  # seconds of the processor in which a model must load, and know its golden image
_COMPUTING = 10.0  # and in which it must classify an image
_ENOUGH = 60.0  # and after which it need not classify more than so many images
_LEAST = 16
_MODULE = "edge.inference.trial_process"
_REMEDY = "export the model again, and ask who made it"


class _Load(msgspec.Struct, frozen=True, tag=True):
    """Load a bundle."""

    folder: str
    digest: str  # of its manifest


class _Classify(msgspec.Struct, frozen=True, tag=True):
    """Classify an image with the bundle that was loaded before."""

    pixels: bytes  # uint8 [size, size, 3]


class _Answer(msgspec.Struct, frozen=True):
    """What is wrong with the model, and what to do; nothing if it computes."""

    what: str = ""
    remedy: str = ""


class ModelTrial:
    """Tries models, one at a time; another thread may end that."""

    def __init__(
        self,
        loading: float = _LOADING,
        computing: float = _COMPUTING,
        enough: float = _ENOUGH,
    ) -> None:
        """Give a model so many seconds of the processor to load, and to classify an image;
        and so many seconds for all images, if 16 of them do not take longer.
        """
        self._loading = loading
        self._computing = computing
        self._enough = enough
        self._workers = WorkerProcesses(_MODULE)
        self._stopped = threading.Event()

    def check(self, bundle: Bundle, images: Iterable[NDArray[np.uint8]] = ()) -> int:
        """Let a bundle, whose files are known to be intact, compute;
        return how many of the images it has classified.

        Args:
            bundle: the bundle.
            images: each uint8 [size, size, 3], of the size that it wants.

        Raises:
            BundleError: it does not compute within limits, or not what it promises.
            EdgeNodeError: the system grants us no process.
        """
        with self._ending(bundle):
            self._ask(_Load(str(bundle.folder.absolute()), bundle.digest), self._loading)
            tried = 0
            start = time.monotonic()
            for image in images:
                if tried >= _LEAST and time.monotonic() - start > self._enough:
                    break
                self._ask(_Classify(image.tobytes()), self._computing)
                tried += 1
        return tried

    def stop(self) -> None:
        """End a trial that goes on, and begin none any more."""
        self._stopped.set()
        self._workers.kill()

    @contextmanager
    def _ending(self, bundle: Bundle) -> Iterator[None]:
        """End the process afterwards; say what it means if it has ended before."""
        with closing(self._workers):
            try:
                yield
            except WorkerEndedError as error:
                why = "it takes too much memory, or crashes"
                if error.is_late:
                    why = (
                        f"it takes more than {self._loading:g} s to load, or {self._computing:g} s "
                        "an image"
                    )
                if self._stopped.is_set():
                    why = "the line ends"
                raise BundleError(
                    f"{bundle.folder} does not compute within a trial's limits: {why}", _REMEDY
                ) from None

    def _ask(self, request: _Load | _Classify, seconds: float) -> None:
        if self._stopped.is_set():
            raise WorkerEndedError(0)
        reply = self._workers.ask([msgspec.msgpack.encode(request)], seconds)
        answer = msgspec.msgpack.decode(reply, type=_Answer)
        if answer.what:
            raise BundleError(answer.what, answer.remedy or _REMEDY)


_loaded = None  # in the trial process: the predictor


def answer_trial(request: bytes) -> Sequence[bytes]:
    """A trial process's answer."""
    try:
        _carry_out(msgspec.msgpack.decode(request, type=_Load | _Classify))
    except Exception as error:  # onnxruntime has a dozen of its own, with no common base
        explained = explain(error)
        return [msgspec.msgpack.encode(_Answer(explained.what, explained.remedy))]
    return [msgspec.msgpack.encode(_Answer())]


def _carry_out(request: _Load | _Classify) -> None:
    global _loaded  # noqa: PLW0603  (a process tries one model)
    # only the trial process takes the time to load onnxruntime
    from edge.inference.predictor import Predictor  # noqa: PLC0415

    if isinstance(request, _Load):
        bundle = read_bundle(Path(request.folder))
        if bundle.digest != request.digest:
            raise BundleError(f"{bundle.folder} has become another bundle meanwhile", "start again")
        _loaded = Predictor(bundle, threads=1)
        _loaded.self_test()
        return
    assert _loaded is not None
    size = _loaded.manifest.input.size
    _loaded.run(np.frombuffer(request.pixels, np.uint8).reshape(1, size, size, 3))
