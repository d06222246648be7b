"""The line itself: how many decoded frames may wait."""

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from edge import line as lines
from edge.line import Frame, Line, Nowhere, load
from tests.tiny_bundle import RED, tiny_bundle


def test_frames_wait_as_files_and_only_a_few_are_decoded_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, cut = threading.Semaphore(0), lines.cut

    def counted(*arguments: object) -> object:
        decoded.release()
        return cut(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(lines, "cut", counted)

    async def crowd(line: Line) -> int:
        judged = asyncio.gather(*(line.judge(Frame(str(number), RED)) for number in range(20)))
        busy, go_on = threading.Event(), threading.Event()
        line.watchers = (lambda seen: (busy.set(), go_on.wait(10), seen.verdict)[-1],)
        await asyncio.to_thread(busy.wait, 10)
        ahead = 0
        while await asyncio.to_thread(decoded.acquire, timeout=0.2):
            ahead += 1
        go_on.set()
        await judged
        return ahead

    with contextlib.closing(Line(load(tiny_bundle(tmp_path / "bundle").folder), Nowhere())) as line:
        assert asyncio.run(crowd(line)) == 3
