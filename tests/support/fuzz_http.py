"""Malformed HTTP requests against a daemon:
`python -m tests.support.fuzz_http 10000` prints what became of them.

Each may be refused with a status of the client's fault, or answered, or its connection closed;
nothing else may come of it: no status of the server's fault, no crash, no traceback, no growth of
memory, no connection that stays. The seed is printed: with it and the same code the same requests
come again.
"""

import argparse
import asyncio
import contextlib
import gzip
import io
import itertools
import json
import re
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random, getrandbits
from typing import Any, NamedTuple

import psutil
from PIL import Image as Picture

from edge.inference.image_decoding import MAX_BYTES, MAX_PIXELS
from tests.support.daemon_process import Daemon, daemon
from tests.support.frame_mutation import RAW
from tests.support.tiny_bundle import RED, tiny_bundle
from tests.support.waiting import PATIENCE, wait_until

AT_ONCE = 8  # connections
# bytes that the daemon may grow, once it has seen a fifth of the requests: ten times what it does
GROWTH = 1 << 30
BOMBS = 6  # kinds
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
SIZE = 16
INFER = "/v2/models/tiny/infer"
PATHS = (
    "/",
    "/classify",
    "/line/state",
    "/line/pictures/0",
    "/metrics",
    "/openapi.json",
    "/v2",
    "/v2/health/ready",
    "/v2/models/tiny",
    INFER,
)
METHODS = (
    "GET",
    "POST",
    "HEAD",
    "PUT",
    "DELETE",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "CONNECT",
    "PRI",
    "get",
    "",
)


class Shot(NamedTuple):
    """What is sent on one connection; `whole` when an answer must come."""

    data: bytes
    whole: bool = False


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """A request whose length is right."""
    lines = (
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(body)}",
        *headers,
        "",
        "",
    )
    return "\r\n".join(lines).encode("latin-1") + body


def bombs() -> tuple[bytes, ...]:
    """Small requests that are large once they are unpacked."""
    plain = gzip.compress(bytes(MAX_BYTES + 1), 9)
    twice = zlib.compress(zlib.compress(bytes(MAX_BYTES), 9), 9)
    image = io.BytesIO()
    side = int(MAX_PIXELS**0.5) + 1
    Picture.new("1", (side, side)).save(image, "PNG")
    deep = b'{"inputs":' + b"[" * 1_000_000
    lists = json.dumps(
        {"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1000, 16, 16, 3]}]}
    ).encode()
    lists = lists[:-3] + b',"data":[' + b"[]," * 3_000_000 + b"[]]}]}"
    return (
        request("POST", INFER, plain, "Content-Encoding: gzip"),
        request("POST", "/classify", plain, "Content-Encoding: gzip"),
        request("POST", INFER, twice, "Content-Encoding: deflate"),
        request("POST", "/classify", image.getvalue()),
        request("POST", INFER, deep),
        request("POST", INFER, lists),
    )


class Gunner:
    """Makes requests that nobody should send."""

    def __init__(self, random: Random) -> None:
        self.random = random
        pixels = bytes(SIZE * SIZE * 3)
        tensor = {"name": "image", "datatype": "UINT8", "shape": [1, SIZE, SIZE, 3]}
        head = json.dumps(
            {"inputs": [tensor | {"parameters": {"binary_data_size": len(pixels)}}], "id": "7"}
        ).encode()
        self._asked: dict[str, Any] = {"inputs": [tensor | {"data": list(pixels)}], "outputs": []}
        self.good = (
            request("GET", "/v2/models/tiny"),
            request("POST", "/classify?name=part", RED),
            request("POST", INFER, json.dumps(self._asked).encode()),
            request("POST", INFER, head + pixels, f"Inference-Header-Content-Length: {len(head)}"),
            request(
                "POST",
                INFER,
                gzip.compress(json.dumps(self._asked).encode()),
                "Content-Encoding: gzip",
            ),
        )
        self._bombs = itertools.cycle(bombs())
        self._kinds: tuple[tuple[Callable[[], Shot], int], ...] = (
            (self._noise, 10),
            (self._truncated, 15),
            (self._damaged, 25),
            (self._wrong_length, 10),
            (self._bad_json, 15),
            (self._misfit, 15),
            (self._lying_tensor, 10),
            (self._headers, 15),
            (self._chunks, 10),
            (self._pipelined, 10),
            (self._elsewhere, 10),
            (self.bomb, 1),
        )

    def shot(self) -> tuple[str, Shot]:
        """One more, and of which kind it is."""
        [kind] = self.random.choices(
            [kind for kind, _ in self._kinds], [share for _, share in self._kinds]
        )
        return kind.__name__.lstrip("_"), kind()

    def _noise(self) -> Shot:
        return Shot(self.random.randbytes(self.random.choice((1, 10, 100, 5000))))

    def _truncated(self) -> Shot:
        good = self.random.choice(self.good)
        return Shot(good[: self.random.randrange(len(good))])

    def _damaged(self) -> Shot:
        data = bytearray(self.random.choice(self.good))
        # Mostly in the head: what stands in the body is often only another picture.
        end = data.find(b"\r\n\r\n") if self.random.random() < 0.7 else len(data)
        for _ in range(self.random.choice((1, 1, 3, 20))):
            at, length = self.random.randrange(end), self.random.choice((1, 1, 2, 10))
            data[at : at + self.random.choice((0, length))] = self.random.randbytes(
                self.random.choice((0, length))
            )
        return Shot(bytes(data))

    def _wrong_length(self) -> Shot:
        length = self.random.choice(
            ("-1", "0", "1", "99999999999999999999999", "5, 5", "0x10", " ", "1e3", "67108865")
        )
        return Shot(
            request(
                "POST", self.random.choice((INFER, "/classify")), RED, f"Content-Length: {length}"
            )
        )

    def _bad_json(self) -> Shot:
        text = json.dumps(self._asked)
        value = self.random.choice(
            [*RAW, "{}", "[]", "null", "true", "-1", "1" * 5000, '"\\u0000"', "[[]]"]
        )
        at = self.random.choice([match.start() for match in re.finditer(r'[0-9"\[{]', text[:300])])
        body = (text[:at] + value + text[at + self.random.choice((0, 1)) :]).encode(
            "utf-8", "surrogatepass"
        )
        return Shot(request("POST", INFER, body), whole=True)

    def _misfit(self) -> Shot:
        one = self._asked["inputs"][0] | {
            self.random.choice(("name", "datatype", "shape", "data", "parameters")): self._value()
        }
        asked = {
            "inputs": [one] * self.random.choice((0, 1, 1, 1, 2)),
            "outputs": self._value(),
            "id": self._value(),
        }
        keys = self.random.sample(list(asked), self.random.randint(1, 3))
        body = json.dumps({key: asked[key] for key in keys} | {"inputs": asked["inputs"]})
        return Shot(request("POST", INFER, body.encode()), whole=True)

    def _value(self) -> Any:
        choices = (
            [],
            {},
            None,
            "",
            "BYTES",
            "FP32",
            -1,
            1.5,
            10**30,
            [1, 16, 16, 3],
            [2, 16, 16, 3],
            [10**9, 16, 16, 3],
            [-1, 16, 16, 3],
            [[]] * 768,
            [[[[0] * 3] * 16] * 16] * 2,
            [256] * 768,
            ["AAAA"],
            [{"name": "probabilities", "parameters": {"classification": 10**9}}],
            [{"name": "probabilities"}] * 3,
            {"binary_data_size": 10**18},
            {"binary_data_size": True},
            "x" * 10_000,
        )
        return self.random.choice(choices)

    def _lying_tensor(self) -> Shot:
        kind, shape = self.random.choice(
            (("UINT8", [1, SIZE, SIZE, 3]), ("BYTES", [1]), ("BYTES", [3]))
        )
        rest = self.random.randbytes(self.random.choice((0, 3, 4, 767, 768, 769)))
        if kind == "BYTES" and self.random.random() < 0.5:
            rest = b"".join(len(each).to_bytes(4, "little") + each for each in (RED, rest, b""))
        size = len(rest) + self.random.choice((0, 0, 0, 1, -1, 2**31, 2**63))
        tensor = {
            "name": "image",
            "datatype": kind,
            "shape": shape,
            "parameters": {"binary_data_size": size},
        }
        head = json.dumps({"inputs": [tensor]}).encode()
        length = self.random.choice(
            (len(head), len(head), len(head) + 1, len(head) - 1, 0, 10**9, -5, 10**30, "x", "")
        )
        return Shot(
            request("POST", INFER, head + rest, f"Inference-Header-Content-Length: {length}"),
            whole=True,
        )

    def _headers(self) -> Shot:
        abuse: tuple[tuple[str, ...], ...] = (
            ("X: " + "x" * 100_000,),
            ("X" * 100_000 + ": x",),
            tuple(f"X-{number}: x" for number in range(20_000)),
            ("Transfer-Encoding: chunked",),
            ("Transfer-Encoding: gzip, chunked",),
            ("Content-Encoding: " + self.random.choice(("br", "gzip, gzip", "", "\x00")),),
            ("Connection: Upgrade", "Upgrade: " + self.random.choice(("websocket", "h2c"))),
            ("Expect: 100-continue",),
            ("Expect: " + "9" * 50,),
            (" folded: x",),
            ("no colon",),
            (": nameless",),
            ("Host: \xff\xfe\x00",),
            ("Content-Type: multipart/form-data",),
        )
        return Shot(request("POST", self.random.choice(PATHS), RED, *self.random.choice(abuse)))

    def _chunks(self) -> Shot:
        head = (
            f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        ).encode()
        sizes = (
            b"5",
            b"0",
            b"-1",
            b"ffffffffffffffffff",
            b"5;" + b"x" * 1000,
            b"zz",
            b"",
            b"00000000005",
        )
        chunks = (
            self.random.choice(sizes) + b"\r\n" + self.random.choice((b"hello", b"", RED)) + b"\r\n"
            for _ in "123"
        )
        trailer = self.random.choice(
            (b"", b"0\r\n\r\n", b"0\r\nX: " + b"x" * 100_000 + b"\r\n\r\n")
        )
        return Shot(head + b"".join(chunks) + trailer)

    def _pipelined(self) -> Shot:
        shots = [self.random.choice(self.good) for _ in range(self.random.choice((2, 5, 50)))]
        shots.insert(
            self.random.randrange(len(shots)),
            self.random.choice((b"", b"\r\n\r\n", b"garbage\r\n\r\n")),
        )
        return Shot(b"".join(shots))

    def _elsewhere(self) -> Shot:
        paths = (
            *PATHS,
            "/" + "x" * self.random.choice((10, 60_000)),
            "*",
            "http://other/v2",
            "/%ff%00%zz",
            "/../etc/passwd",
            "/v2/models/%74iny/infer",
            "/v2/models/tiny/versions/99/infer",
            "/v2//models",
            f"/classify?name={'x' * 5000}",
            "/classify?" + "&" * 5000,
            "no-slash",
            "/\xff",
        )
        body = self.random.choice((b"", RED, b"{"))
        return Shot(request(self.random.choice(METHODS), self.random.choice(paths), body))

    def bomb(self) -> Shot:
        """The next of those that would burst."""
        return Shot(next(self._bombs), whole=True)


class Battle:
    """Requests against one daemon, and what came of them."""

    def __init__(self, line: Daemon, seed: int) -> None:
        self.line = line
        self.gunner = Gunner(Random(seed))
        self.statuses: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.process = psutil.Process(line.process.pid)

    def fight(self, count: int) -> int:
        """Send so many; bytes by which the daemon has grown since the largest of all kinds,
        and a fifth of all.
        """
        asyncio.run(self._volleys(count // 5))
        for _ in range(BOMBS):
            asyncio.run(self._fire("bomb", self.gunner.bomb()))
        before = self._memory()
        asyncio.run(self._volleys(count - count // 5))
        return self._memory() - before

    def _memory(self) -> int:
        """Once nothing is in hand any more."""
        least = self.process.memory_info().rss
        for _ in range(20):
            time.sleep(0.05)  # between two looks: memory comes back when it pleases
            least = min(least, self.process.memory_info().rss)
        return least

    async def _volleys(self, count: int) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with gate:
                kind, shot = self.gunner.shot()
                self.kinds[kind] += 1
                await self._fire(kind, shot)

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one())

    async def _fire(self, kind: str, shot: Shot) -> None:
        """Send it, again if the daemon is busy with those whose clients have gone."""
        deadline = time.monotonic() + PATIENCE
        while "503" in (statuses := await self._answered(shot)):
            assert time.monotonic() < deadline, "it stays busy"
            self.statuses.update(statuses)
            await asyncio.sleep(0.05)  # as a client that is told to come later
        self.statuses.update(statuses or ["none"])
        assert not any(status >= "500" for status in statuses), (kind, shot.data[:3000], statuses)
        assert statuses or not shot.whole, (kind, shot.data[:3000])

    async def _answered(self, shot: Shot) -> list[str]:
        """The statuses of all answers; TimeoutError if the connection does not end."""
        reader, writer = await asyncio.open_connection(self.line.url.host, self.line.url.port)
        answer = b""
        try:
            async with asyncio.timeout(PATIENCE):
                writer.write(shot.data)
                with contextlib.suppress(OSError):  # it may have been refused by now
                    writer.write_eof()
                while piece := await reader.read(1 << 16):
                    answer += piece
        except ConnectionError:
            pass
        finally:
            writer.close()
        return [status.decode() for status in STATUS.findall(answer)]


def check(line: Daemon) -> None:
    """The daemon is as it was: it judges, holds no connection but ours,
    and knows of no fault of its own.
    """
    assert line.classify(RED).json()["label"] == "red"
    answers = re.findall(
        r'^edge_node_http_requests_total{code="(\d+)"',
        line.client.get("/metrics").text,
        re.MULTILINE,
    )
    assert "200" in answers, answers
    assert {code for code in answers if code >= "500"} <= {"503"}, answers
    process = psutil.Process(line.process.pid)

    def held() -> list[object]:
        return [each for each in process.net_connections() if each.status == "ESTABLISHED"]

    wait_until(lambda: len(held()) <= 1, said=lambda: f"{len(held())} connections stay")


def main() -> None:
    """Send many, and say what became of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("requests", type=int)
    parser.add_argument("--seed", type=int, default=getrandbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon(tiny_bundle(Path(folder) / "bundle").folder) as line,
    ):
        battle = Battle(line, options.seed)
        grown = battle.fight(options.requests)
        check(line)
        line.client.close()
        ended = line.end()
    assert ended == (0, "", ""), ended[2][-3000:]
    assert grown < GROWTH, grown
    print("sent: " + ", ".join(f"{count} {kind}" for kind, count in sorted(battle.kinds.items())))
    print(
        "answers: "
        + ", ".join(f"{count} x {status}" for status, count in sorted(battle.statuses.items()))
    )
    print(
        f"{options.requests} requests in {time.monotonic() - start:.0f} s; memory grew by "
        f"{grown / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
