"""Experiment trackers that `--track` names, one file each, imported when it is wanted."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from broker_config.protocol.errors import UsageError, suggest
from broker_config.registry import Registry
from edge_node.extensions.tracking.tracker import Tracker, tracking
from trainer.progress.events import Report

_TRACKERS: Registry[Callable[[str], Tracker]] = Registry("trackers")


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
    if name not in _TRACKERS:
        raise UsageError(f"there is no tracker {name!r}", suggest(name, _TRACKERS))
    return _TRACKERS[name](place)
