"""Scheduling of transfers: which few of many run now, and which wait. No threads, no clock."""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class TransferSlots(Generic[T]):
    """A limited number of active transfers and a queue for the others;
    unresponsive ones wait behind all others.
    """

    def __init__(self, capacity: int):
        self.active: list[T] = []
        self._capacity = capacity
        self._waiting: dict[T, None] = {}  # in order
        self._unresponsive: dict[T, None] = {}  # likewise

    def add(self, transfer: T) -> None:
        """Queue a transfer unless it is active; one that was unresponsive is queued with the
        others again.
        """
        if transfer not in self.active:
            self._unresponsive.pop(transfer, None)
            self._waiting.setdefault(transfer)

    def demote(self, transfer: T) -> None:
        """Let an active but unresponsive transfer wait, if another one waits for its place."""
        if self._waiting or self._unresponsive:
            self.active.remove(transfer)
            self._unresponsive[transfer] = None

    def remove(self, transfer: T) -> None:
        """Forget a transfer, active or not."""
        if transfer in self.active:
            self.active.remove(transfer)
        self._waiting.pop(transfer, None)
        self._unresponsive.pop(transfer, None)

    def start_next(self) -> T | None:
        """Return a transfer that is active from now on;
        None if there is no free place or none waits.
        """
        queue = self._waiting or self._unresponsive
        if len(self.active) >= self._capacity or not queue:
            return None
        transfer = next(iter(queue))
        del queue[transfer]
        self.active.append(transfer)
        return transfer
