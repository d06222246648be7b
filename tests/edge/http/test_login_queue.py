"""Each client gets to log in, however many attempts others send."""

import asyncio

import pytest

from edge.http.login_queue import IN_ALL, PER_CLIENT, LoginQueue
from edge.http.request import RequestError


class Visitors:
    """Attempts, each of which takes as long as the test wants."""

    def __init__(self) -> None:
        self.queue = LoginQueue()
        self.order: list[str] = []
        self.may_go_on = asyncio.Event()

    async def start(self, client: str) -> asyncio.Task[None]:
        """Let an attempt begin."""
        task = asyncio.create_task(self._attempt(client))
        await asyncio.sleep(0)
        return task

    async def _attempt(self, client: str) -> None:
        async with self.queue.slot(client):
            self.order.append(client)
            await self.may_go_on.wait()

    async def finish(self, tasks: list[asyncio.Task[None]]) -> list[BaseException | None]:
        """Let all go on, and return what they raised."""
        self.may_go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)


def test_clients_alternate() -> None:
    async def run() -> list[str]:
        visitors = Visitors()
        tasks = [await visitors.start(client) for client in ("a", "a", "a", "a", "b", "c", "b")]
        assert await visitors.finish(tasks) == 7 * [None]
        return visitors.order

    assert asyncio.run(run()) == ["a", "a", "b", "c", "a", "b", "a"]


def test_a_client_has_a_limited_number_of_attempts_at_once_and_others_are_not_counted() -> None:
    async def run() -> None:
        visitors = Visitors()
        tasks = [await visitors.start("a") for _ in range(PER_CLIENT + 3)]
        tasks.append(await visitors.start("b"))
        found = await visitors.finish(tasks)
        assert [isinstance(each, RequestError) for each in found] == (
            PER_CLIENT * [False] + 3 * [True] + [False]
        )

    asyncio.run(run())


def test_when_all_places_are_taken_whoever_has_the_most_gives_way() -> None:
    async def run() -> None:
        visitors = Visitors()
        many = [await visitors.start(f"{each // PER_CLIENT}") for each in range(IN_ALL + 1)]
        one = await visitors.start("one more")
        found = await visitors.finish([*many, one])
        assert sum(isinstance(each, RequestError) for each in found) == 1
        assert found[-1] is None

    asyncio.run(run())


@pytest.mark.parametrize("when", ["waiting", "just then"])
def test_who_goes_away_keeps_nobody_waiting(when: str) -> None:
    async def run() -> list[str]:
        visitors = Visitors()
        first = await visitors.start("a")
        leaving = await visitors.start("b")
        last = await visitors.start("c")
        if when == "just then":
            visitors.may_go_on.set()
            await asyncio.sleep(0)  # the first leaves: b may begin, and does not know yet
        leaving.cancel()
        await visitors.finish([first, leaving, last])
        assert await visitors.finish([await visitors.start("d")]) == [None]
        return [each for each in visitors.order if each != "b"]

    assert asyncio.run(run()) == ["a", "c", "d"]
