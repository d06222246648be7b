"""A line answers whoever calls it by its name, and no web page that it does not know,
whatever leads a browser here.
"""

import asyncio
import contextlib
import socket
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request

from broker_config.protocol.errors import UsageError
from edge.http.access import Access
from edge.http.app import App
from edge.http.prometheus_metrics import Metrics
from edge.http.request import RequestError
from edge.inference.pipeline import NullConsumer, Pipeline
from edge.inference.served_model import load_model
from tests.support.daemon_process import daemon
from tests.support.tiny_bundle import RED, tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("access") / "bundle").folder


def posted(bundle: Path, access: Access, **headers: str) -> int:
    """The status with which an image is answered."""

    async def post() -> int:
        with contextlib.closing(Pipeline(load_model(bundle), NullConsumer())) as line:
            transport = httpx.ASGITransport(App(line, Metrics(), access))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost:8080"
            ) as client:
                answer = await client.post("/classify", content=RED, headers=headers)
                assert "error" not in answer.json() or answer.json()["remedy"]
                return answer.status_code

    return asyncio.run(post())


PLAIN = Access.of("127.0.0.1", ["line.plant.example"], "")


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8080",
        "127.0.0.1:8080",
        "[::1]:8080",
        "192.168.3.4",
        "LocalHost",
        "line.plant.example:443",
    ],
)
def test_it_is_called_by_its_names_and_addresses(bundle: Path, host: str) -> None:
    assert posted(bundle, PLAIN, host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "localhost.evil",
        "[::1",
        "a b",
    ],
)
def test_a_name_that_somebody_else_lets_point_here_is_refused(bundle: Path, host: str) -> None:
    """Else a page of that name could read all and post: DNS rebinding."""
    assert posted(bundle, PLAIN, host=host) == 421


OWN_NAME = socket.gethostname()


@pytest.mark.parametrize("name", [OWN_NAME, f"{OWN_NAME.partition('.')[0]}.local"])
def test_its_machines_names_are_its_own_where_others_reach_it_and_only_there(
    bundle: Path, name: str
) -> None:
    """On loopback they help nobody but who answers mDNS with another address first."""
    assert posted(bundle, Access.of("0.0.0.0", [], ""), host=name) == 200  # noqa: S104
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert posted(bundle, Access.of(host, [], ""), host=name) == 421
    assert posted(bundle, Access.of("127.0.0.1", [name], ""), host=name) == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8080", 200),
        ("https://line.plant.example", 200),
        ("http://evil.example", 403),
        ("http://localhost:3000", 403),
        ("http://6.6.6.6", 403),
        ("null", 403),
    ],
)
def test_pages_of_other_origins_are_refused(bundle: Path, origin: str, status: int) -> None:
    assert posted(bundle, PLAIN, origin=origin) == status


@pytest.mark.parametrize("name", ["Host", "Origin", "Authorization"])
def test_a_request_that_says_twice_who_asks_whom_is_refused(name: str) -> None:
    """A proxy before the line may have looked at the other one."""
    values = {"Host": "localhost", "Origin": "http://localhost", "Authorization": "Bearer x"}
    first = [(key.lower().encode(), value.encode()) for key, value in values.items()]
    second = (name.lower().encode(), b"evil.example")
    scope = {"type": "http", "method": "POST", "path": "/classify", "headers": first}
    PLAIN.check(Request(scope))
    with pytest.raises(RequestError) as refused:
        PLAIN.check(Request(scope | {"headers": [*first, second]}))
    assert refused.value.status == 400


def test_where_there_is_a_token_whoever_posts_needs_it(bundle: Path) -> None:
    access = Access.of("0.0.0.0", [], "a secret")  # noqa: S104
    assert posted(bundle, access) == 401
    assert posted(bundle, access, authorization="Bearer another") == 401
    assert posted(bundle, access, authorization="Basic a secret") == 401
    assert posted(bundle, access, authorization="Bearer a secret") == 200
    # RFC 9110: whatever the case
    assert posted(bundle, access, authorization="bearer a secret") == 200


@pytest.mark.parametrize(
    "given", ["line.plant.example", "Line.Plant.Example.", "line.plant.example:443"]
)
def test_a_name_may_be_given_as_it_stands_in_an_address(bundle: Path, given: str) -> None:
    assert posted(bundle, Access.of("127.0.0.1", [given], ""), host="line.plant.example") == 200


@pytest.mark.parametrize(
    "given", ["https://line.plant.example", "line.plant.example/", "*", "*.example", "prüfung", ""]
)
def test_what_could_never_be_a_name_is_refused_at_the_start(given: str) -> None:
    with pytest.raises(UsageError, match="no name"):
        Access.of("127.0.0.1", [given], "")


def test_the_daemon_checks_it_and_warns_where_others_reach_it(bundle: Path) -> None:
    with daemon(bundle, host="0.0.0.0") as line:  # noqa: S104
        assert "whoever reaches port" in line.said
        url = f"http://127.0.0.1:{line.url.port}"
        assert httpx.get(f"{url}/metrics", headers={"host": "evil.example"}).status_code == 421
        assert (
            httpx.get(
                f"{url}/v2/health/ready", headers={"host": "pool-of-a-load-balancer"}
            ).status_code
            == 200
        )
        assert (
            httpx.post(
                f"{url}/classify", content=RED, headers={"origin": "http://evil.example"}
            ).status_code
            == 403
        )
        assert httpx.post(f"{url}/classify", content=RED).status_code == 200


def test_the_daemon_has_its_token_from_the_environment_and_then_does_not_warn(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_NODE_HTTP_TOKEN", "a secret")
    with daemon(bundle, host="0.0.0.0") as line:  # noqa: S104
        assert "whoever reaches port" not in line.said
        url = f"http://127.0.0.1:{line.url.port}"
        assert httpx.post(f"{url}/classify", content=RED).status_code == 401
        assert httpx.get(f"{url}/v2/health/ready").status_code == 200
