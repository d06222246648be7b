"""Queue of those who log in: one at a time, and fair between clients.

A password's hash takes 64 MiB and a core on purpose, so one is checked at a time. Whoever sends
guesses all the time must not keep the others waiting: each client has a queue of its own, and
the next attempt is of the client whose last one is the longest ago.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edge.http.request import RequestError

PER_CLIENT = 4  # attempts of one client at once
IN_ALL = 64  # attempts that wait


class LoginQueue:
    """Attempts that wait, by client."""

    def __init__(self) -> None:
        self._queues = OrderedDict[str, deque[asyncio.Future[None]]]()  # the next client first
        self._current: str | None = None

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Wait until no other attempt is made; RequestError if too many wait."""
        if self._current is None:
            self._current = client
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: str) -> None:
        place = asyncio.get_running_loop().create_future()
        self._line_up(client, place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was just about to begin
                self._pass_on()
            else:
                place.cancel()
            raise

    def _line_up(self, client: str, place: asyncio.Future[None]) -> None:
        own = len(self._queues.get(client, ())) + (self._current == client)
        if own >= PER_CLIENT:
            raise _too_many()
        if sum(map(len, self._queues.values())) >= IN_ALL:
            longest = max(self._queues.values(), key=len)
            if len(longest) <= own + 1:
                raise _too_many()
            # whoever has the most gives way
            displaced = longest.pop()
            if not displaced.done():
                displaced.set_exception(_too_many())
        self._queues.setdefault(client, deque()).append(place)

    def _pass_on(self) -> None:
        """Let the next client's oldest attempt begin."""
        self._current = None
        while self._queues and self._current is None:
            client, queue = self._queues.popitem(last=False)
            place = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind all others
            if not place.done():
                place.set_result(None)
                self._current = client


def _too_many() -> RequestError:
    return RequestError(
        "too many people are logging in", "try again in a moment", 503, {"retry-after": "5"}
    )
