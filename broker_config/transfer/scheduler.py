"""Who of many is served now, and who waits. No threads, no clock."""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class TransferScheduler(Generic[T]):
    """A few places and a queue for them. Those that were found silent wait behind all others."""

    def __init__(self, places: int):
        self.served: list[T] = []
        self._places = places
        self._waiting: dict[T, None] = {}  # in order
        self._silent: dict[T, None] = {}  # likewise

    def join(self, one: T) -> None:
        """Wait for a place, if it has none; as one that was silent and is heard of: with the others again."""
        if one not in self.served:
            self._silent.pop(one, None)
            self._waiting.setdefault(one)

    def give_way(self, one: T) -> None:
        """A silent one leaves its place if another waits for it, and waits itself."""
        if self._waiting or self._silent:
            self.served.remove(one)
            self._silent[one] = None

    def leave(self, one: T) -> None:
        """Be gone, from wherever it is."""
        if one in self.served:
            self.served.remove(one)
        self._waiting.pop(one, None)
        self._silent.pop(one, None)

    def next(self) -> T | None:
        """Return who is served from now on; None if all places are taken or nobody waits."""
        queue = self._waiting or self._silent
        if len(self.served) >= self._places or not queue:
            return None
        one = next(iter(queue))
        del queue[one]
        self.served.append(one)
        return one
