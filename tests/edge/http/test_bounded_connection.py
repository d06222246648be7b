"""Bounds of a connection: clients that are slow, many, or send too much are refused,
in JSON where they can be told.
"""

import base64
import contextlib
import json
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import Daemon, daemon
from tests.support.tiny_bundle import RED, tiny_bundle

IMAGES = 1000  # of a request that takes long


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_bundle(tmp_path_factory.mktemp("http") / "bundle").folder


BOUNDS = """
import edge.http.bounded_connection as bounds
bounds.MAX_CONNECTIONS, bounds.HEAD_TIME, bounds.LINGER, bounds.SEND_TIME = 20, 0.3, 0.3, 0.3
"""


@pytest.fixture(scope="module")
def bounded(bundle: Path) -> Iterator[Daemon]:
    """A daemon with little patience."""
    with daemon(bundle, before=BOUNDS) as line:
        yield line


def connect(line: Daemon) -> socket.socket:
    return socket.create_connection((line.url.host, line.url.port), timeout=60)


def to_the_end(connection: socket.socket) -> bytes:
    """All that is said until the connection ends, however it ends."""
    found = b""
    with connection, contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def until(connection: socket.socket, end: bytes, status: int = 200) -> None:
    """Read up to what an answer ends with."""
    found = b""
    while not found.endswith(end):
        found += connection.recv(1 << 16)
    assert found.startswith(b"HTTP/1.1 %d " % status), found


def infer(images: int) -> bytes:
    """A request that takes the longer, the more images it has."""
    files = [base64.b64encode(RED).decode()] * images
    tensor = {"name": "image", "datatype": "BYTES", "shape": [images], "data": files}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = (
        "POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    )
    return head.encode() + body


def test_a_client_that_closes_its_connection_is_not_computed_for_any_more(bounded: Daemon) -> None:
    with connect(bounded) as closing:
        # so that it cannot have answered before the end is there
        bounded.process.send_signal(signal.SIGSTOP)
        closing.sendall(infer(200))  # what sockets hold while nobody reads
        closing.shutdown(socket.SHUT_WR)  # as `close` does, but that its answer can be read
        bounded.process.send_signal(signal.SIGCONT)
        assert b"the connection ended before" in to_the_end(closing)


@pytest.mark.parametrize(
    "begun", [b"GET / HT", b"POST /classify HTTP/1.1\r\nHost: localhost\r\nX: "]
)
def test_a_request_whose_head_does_not_end_ends_its_connection(
    bounded: Daemon, begun: bytes
) -> None:
    slow = connect(bounded)
    slow.sendall(begun)
    assert to_the_end(slow).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_drips_does_not_hold_its_connection(bounded: Daemon) -> None:
    slow = connect(bounded)
    slow.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
    assert slow.recv(1000).startswith(b"HTTP/1.1 405 ")
    with slow, contextlib.suppress(ConnectionError):
        while True:
            slow.sendall(b"x")
            time.sleep(0.01)  # a drip now and then


def test_a_client_that_does_not_read_does_not_hold_its_connection(bounded: Daemon) -> None:
    with connect(bounded) as deaf, contextlib.suppress(ConnectionError):
        for _ in range(100_000):
            deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        pytest.fail("it took all requests")


@pytest.mark.parametrize(
    "head",
    [
        b"X: " + b"x" * 500_000,
        b"X: x\r\n" * 100_000,
        b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * 500_000,
    ],
)
def test_a_head_or_a_trailer_without_end_is_refused(bounded: Daemon, head: bytes) -> None:
    endless = connect(bounded)
    with contextlib.suppress(ConnectionError):
        endless.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + head)
    assert to_the_end(endless)[:13] in (b"HTTP/1.1 431 ", b"HTTP/1.1 200 ", b"")


def test_a_client_that_has_said_all_is_answered(bounded: Daemon) -> None:
    two = connect(bounded)
    two.sendall(
        b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
        % (len(RED), RED)
        * 2
        + b"GET"
    )
    two.shutdown(socket.SHUT_WR)
    assert to_the_end(two).count(b'"label":"red"') == 2


def test_what_is_no_http_is_told_so_in_json(bounded: Daemon) -> None:
    stranger = connect(bounded)
    stranger.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    answer = to_the_end(stranger)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"remedy"' in answer


def test_chunks_of_one_byte_are_a_body_like_any_other(bounded: Daemon) -> None:
    answer = bounded.client.post("/classify", content=(RED[at : at + 1] for at in range(len(RED))))
    assert answer.json()["label"] == "red"


# GET /metrics takes until there is a file
LONG = """
import pathlib
import time
from edge.http.prometheus_metrics import Metrics
def wait(self, model):
    while not pathlib.Path({file!r}).exists():
        time.sleep(0.01)
    return b""
Metrics.exposition = wait
"""


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with room for 20 connections, of which a client may have 15."""
    before = BOUNDS.replace("0.3", "1000") + "bounds.MAX_PER_CLIENT = 15\n"
    before += LONG.format(file=str(tmp_path / "go on"))
    folder = tiny_bundle(tmp_path / "bundle").folder
    with daemon(folder, before=before, host="0.0.0.0") as line:  # noqa: S104
        yield line


def connect_as(line: Daemon, number: int) -> socket.socket:
    """Connect as another client on this machine."""
    source = (f"127.0.0.{number}", 0)
    return socket.create_connection(("127.0.0.1", line.url.port), 60, source)


def test_new_connections_take_the_place_of_idle_ones_and_there_are_never_more(
    patient: Daemon, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as closing:
        idle = []
        for number in range(15):
            idle.append(closing.enter_context(connect_as(patient, 2)))
            if number % 2:  # the others have not said anything yet
                idle[-1].sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                until(idle[-1], b"}")
        busy = []
        for number in range(20):
            busy.append(closing.enter_context(connect_as(patient, 3 + number % 2)))
            request = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"
            busy[-1].sendall(request % b"/v2" + request % b"/metrics")
            until(busy[-1], b"}")  # now it is at work on the second
        assert [each.recv(1) for each in idle] == [b""] * 15
        assert to_the_end(connect_as(patient, 5)).startswith(b"HTTP/1.1 503 ")
        (tmp_path / "go on").touch()
        assert {each.recv(13) for each in busy} == {b"HTTP/1.1 200 "}


@pytest.mark.parametrize(
    "half",
    [
        b"GET / HT",
        b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
    ],
    ids=["head", "body", "refused"],
)
def test_half_a_request_on_each_connection_keeps_nobody_out(patient: Daemon, half: bytes) -> None:
    with contextlib.ExitStack() as closing:
        slow = [closing.enter_context(connect_as(patient, 2)) for _ in range(15)]
        slow += [closing.enter_context(connect_as(patient, 3)) for _ in range(5)]
        for each in slow:
            each.sendall(half)
        for number in (4, 5, 2):  # one who sends half a request may send a whole one, too
            with connect_as(patient, number) as honest:
                honest.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                until(honest, b"}")


def test_of_half_requests_those_give_way_of_whom_has_the_most(patient: Daemon) -> None:
    with contextlib.ExitStack() as closing:
        honest = closing.enter_context(connect_as(patient, 4))  # the oldest of all
        honest.sendall(b"GET /v2 HT")
        for number in range(40):
            slow = closing.enter_context(connect_as(patient, 2 + number % 2))
            slow.sendall(b"GET / HT")
        honest.sendall(b"TP/1.1\r\nHost: localhost\r\n\r\n")
        until(honest, b"}")


def test_a_client_has_a_share_of_the_connections(patient: Daemon) -> None:
    with contextlib.ExitStack() as closing:
        many = [closing.enter_context(connect_as(patient, 2)) for _ in range(16)]
        assert many[0].recv(1) == b""  # it took from itself
        few = [closing.enter_context(connect_as(patient, 3)) for _ in range(5)]
        for each in (*many[1:], *few):
            each.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(each, b"}")


def test_requests_that_are_sent_at_once_are_answered_in_order_up_to_a_limit(
    bounded: Daemon,
) -> None:
    paths = [b"/v2", b"/v2/health/live", b"/v2/health/ready"] * 3
    several = connect(bounded)
    several.sendall(
        b"".join(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in paths)
    )
    several.shutdown(socket.SHUT_WR)
    answers = to_the_end(several).split(b"HTTP/1.1 200 OK")[1:]
    assert [b'"live"' in each for each in answers] == [path.endswith(b"live") for path in paths]
    many = connect(bounded)
    many.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
    assert to_the_end(many) == b""


@pytest.mark.parametrize(
    "requests",
    [
        [b""],
        [infer(IMAGES)],
        [infer(IMAGES) + b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2],
        [infer(200) * 5] * 4,  # more than may wait, while the first are computed
    ],
)
def test_who_leaves_with_requests_unanswered_leaves_no_word_in_the_log(
    tmp_path: Path, requests: list[bytes]
) -> None:
    with daemon(tiny_bundle(tmp_path / "bundle").folder) as line:
        for _ in range(5):
            with connect(line) as leaving, contextlib.suppress(ConnectionError):
                # resets it at its end
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                for each in requests:
                    leaving.sendall(each)
                    time.sleep(0.02)  # so that the line has begun with it
                if len(requests) > 1:
                    to_the_end(leaving)
        assert line.classify(RED).json()["label"] == "red"
        code, _, log = line.end()
    assert (code, log) == (0, "")


def test_a_request_that_was_refused_early_may_end_and_the_connection_serves_the_next(
    bounded: Daemon,
) -> None:
    with connect(bounded) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n12")
        until(client, b"}", 405)
        client.sendall(b"345GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(client, b"}")
        with connect(bounded) as other:
            other.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n12")
            to_the_end(other)  # by now a refused body has had its time
        client.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(client, b"}")


@pytest.mark.parametrize(
    ("header", "trailer", "status"),
    [
        ("Host: evil.example", "Host: localhost", 421),
        ("Host: localhost\r\nOrigin: http://evil.example", "Origin: http://localhost", 403),
        ("Host: localhost\r\nContent-Encoding: br", "Content-Encoding: identity", 415),
    ],
)
def test_what_follows_a_chunked_body_takes_no_headers_place(
    bounded: Daemon, header: str, trailer: str, status: int
) -> None:
    with connect(bounded) as client:
        head = f"POST /classify HTTP/1.1\r\n{header}\r\nTransfer-Encoding: chunked\r\n\r\n"
        body = b"%x\r\n%b\r\n0\r\n" % (len(RED), RED)
        client.sendall(head.encode() + body + f"{trailer}\r\n\r\n".encode())
        until(client, b"}", status)
        client.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(client, b"}")
