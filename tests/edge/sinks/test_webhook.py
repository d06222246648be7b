"""A web server gets each outcome, whatever it answers."""

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest

from broker_config.protocol.errors import UsageError
from edge.sinks.sink import Refused, SinkDown
from edge.sinks.webhook import Settings as WebhookSettings
from edge.sinks.webhook import Webhook
from tests.support.numbered_outcomes import items


class Request(NamedTuple):
    path: str
    headers: dict[str, str]
    body: Any


class Server:
    """A web server that answers as it is told to, with 200 when it is not."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answers: queue.Queue[tuple[int, dict[str, str]]] = queue.Queue()
        test = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                test.requests.append(Request(self.path, dict(self.headers), body))
                with contextlib.suppress(queue.Empty):
                    status, headers = test.answers.get_nowait()
                    return self.answer(status, headers)
                return self.answer(200, {})

            def answer(self, status: int, headers: dict[str, str]) -> None:
                self.send_response(status)
                for header in (headers | {"Content-Length": "2"}).items():
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook?line=1"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def will_answer(self, *statuses: int, **headers: str) -> None:
        for status in statuses:
            self.answers.put(
                (status, {name.replace("_", "-"): value for name, value in headers.items()})
            )

    def webhook(self, **options: Any) -> Webhook:
        return Webhook(WebhookSettings(url=self.url, **options))

    def seqs(self) -> list[Any]:
        return [
            [each["seq"] for each in request.body]
            if isinstance(request.body, list)
            else request.body["seq"]
            for request in self.requests
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with contextlib.closing(Server()) as running:
        yield running


def test_outcomes_are_posted_one_by_one_each_with_its_id_as_the_key(server, monkeypatch):
    monkeypatch.setenv("PRESS_HOOK", "Bearer sesame")
    batch = items(1, 3)
    server.webhook(secret="PRESS_HOOK").deliver(batch)  # noqa: S106  (a variable's name)
    assert server.seqs() == [1, 2, 3]
    assert [request.headers["Idempotency-Key"] for request in server.requests] == [
        each.outcome.id for each in batch
    ]
    assert {request.path for request in server.requests} == {"/hook?line=1"}
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer sesame"}


def test_a_service_has_the_secret_from_systemd(server, monkeypatch, tmp_path):
    (tmp_path / "PRESS_HOOK").write_text("Bearer sesame\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    server.webhook(secret="PRESS_HOOK").deliver(items(1, 1))  # noqa: S106
    assert [request.headers["Authorization"] for request in server.requests] == ["Bearer sesame"]


def test_batches_are_arrays(server):
    server.webhook(batch=2).deliver(items(1, 5))
    assert server.seqs() == [[1, 2], [3, 4], [5]]
    assert len({request.headers["Idempotency-Key"] for request in server.requests}) == 3


@pytest.mark.parametrize("status", [500, 503, 429, 401, 404, 301, 308])
def test_a_server_that_cannot_now_gets_the_same_again(status, server):
    server.will_answer(200, status, Retry_After="7", Location="http://127.0.0.1:1/elsewhere")
    with pytest.raises(SinkDown, match=str(status)) as down:
        server.webhook().deliver(items(1, 3))
    assert (down.value.delivered, down.value.retry_after) == (1, 7)
    assert server.seqs() == [1, 2]  # and nobody was asked elsewhere


@pytest.mark.parametrize("status", [400, 413, 422])
def test_an_outcome_that_the_server_will_never_take_is_refused_alone(status, server):
    server.will_answer(200, status)
    with pytest.raises(Refused, match=str(status)) as refused:
        server.webhook().deliver(items(1, 3))
    assert refused.value.delivered == 1
    server.requests.clear()
    server.will_answer(status, status)  # the batch, then its first alone
    with pytest.raises(Refused) as refused:
        server.webhook(batch=3).deliver(items(1, 3))
    assert refused.value.delivered == 0
    assert server.seqs() == [[1, 2, 3], [1]]


def test_a_server_that_is_gone_or_silent_makes_it_wait(server):
    server.close()
    with pytest.raises(SinkDown, match="refused"):
        server.webhook().deliver(items(1, 1))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        webhook = Webhook(
            WebhookSettings(url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.1)
        )
        with pytest.raises(SinkDown, match="timed out"):
            webhook.deliver(items(1, 1))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"url": "ftp://host/"}, "webhook"),
        ({"url": "http://user:secret@host/"}, "webhook"),
        ({"url": "http://host:99999/"}, "webhook"),
        ({"url": "http://host/", "secret": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
        ({"url": "https://host/", "ca": "/no/file.pem"}, "file.pem"),
    ],
)
def test_a_webhook_that_cannot_work_is_refused_at_the_start(options, what):
    with pytest.raises(UsageError, match=what) as refused:
        Webhook(WebhookSettings(**options))
    assert "user:secret" not in str(refused.value)
