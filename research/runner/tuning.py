"""The best of several trials, read from the finished cells of the tuning pool:
nothing else is written down.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from statistics import mean
from typing import Literal, NamedTuple, TypeVar

import msgspec

from broker_config.protocol.messages import Option, Training

K = TypeVar("K", bound=Hashable)  # what is tuned
Pool = Literal["report", "tuning"]
Place = Hashable  # where trials are compared: a setting and a seed


class Trial(NamedTuple):
    """What a method is run with: its options and its training, both complete."""

    options: dict[str, Option]
    training: Training

    @property
    def key(self) -> str:
        """The same text for equal trials."""
        return msgspec.json.encode(tuple(self), order="deterministic").decode()


def choose_best(tried: Mapping[K, Sequence[tuple[Trial, Mapping[Place, float]]]]) -> dict[K, Trial]:
    """The best trial of each, by what its trials reached at each place (a setting and a seed).

    Empty unless there is one for all. Trials are compared where, of everything that is tuned, most
    are finished; one that is not has failed there, and does not count. The first of equals is
    taken.
    """
    counts = [
        (Counter(place for _, reached in each for place in reached), len(each) / 2)
        for each in tried.values()
    ]
    everywhere = {place for count, _ in counts for place in count}
    places = {place for place in everywhere if all(count[place] > half for count, half in counts)}
    chosen = {}
    for name, trials in tried.items():
        complete = [(trial, reached) for trial, reached in trials if places <= reached.keys()]
        if not places or not complete:
            return {}
        chosen[name] = max(complete, key=lambda each: mean(each[1][place] for place in places))[0]
    return chosen
