"""Experiment trackers that `--track` names, one file each, imported when it is wanted."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from broker_config.protocol.errors import UsageError, suggest
from trainer.progress.events import Report
from trainer.progress.trackers.tracker import Tracker, tracking

_CLASSES = {"tensorboard": "TensorBoard", "mlflow": "MLflow"}  # by module


@contextmanager
def track(wanted: Mapping[str, str], report: Report) -> Iterator[Report]:
    """A report that also feeds trackers, given as name and place.

    Raises:
        UsageError: there is no such tracker, its package is not installed, or the place cannot be
            one.
    """
    made = {name: _make(name, place) for name, place in wanted.items()}
    with ExitStack() as stack:
        for name, tracker in made.items():
            report = stack.enter_context(tracking(name, tracker, report))
        yield report


def _make(name: str, place: str) -> Tracker:
    if name not in _CLASSES:
        raise UsageError(f"there is no tracker {name!r}", suggest(name, _CLASSES))
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise UsageError(
            f"--track {name} needs {package}, which is not installed here",
            "install it: pip install 'edge-node[tracking]'",
        ) from error
    tracker: Tracker = getattr(module, _CLASSES[name])(place)
    return tracker
