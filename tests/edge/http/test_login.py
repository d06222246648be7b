"""Who may change something logs in; the session is a cookie that no other person or site has,
can guess or use.
"""

import asyncio
import http.cookies
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from broker_config.protocol.errors import UsageError
from edge.cli.main import app
from edge.http.access import Access
from edge.http.login import SESSION, Accounts, Logins
from edge.http.request import Request, Response, Route
from edge.http.router import Router

MIA = {"name": "mia", "password": "correct horse"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Accounts of which mia is one; a hash is slow on purpose."""
    accounts = Accounts(tmp_path_factory.mktemp("accounts"))
    accounts.set(**MIA)
    return accounts.path.read_bytes()


@pytest.fixture
def accounts(tmp_path: Path, hashed: bytes) -> Accounts:
    found = Accounts(tmp_path)
    found.path.write_bytes(hashed)
    return found


def visit(
    accounts: Accounts,
    steps: Callable[[httpx.AsyncClient], Awaitable[None]],
    clock: Clock | None = None,
    url: str = "http://localhost:8080",
    token: str = "",
) -> None:
    """Take steps in a browser of a server on which only those who have logged in may label."""

    async def label(request: Request) -> Response:
        return Response.json({"by": request.user})

    async def run() -> None:
        routes = [Route("/label", "POST", label, "login"), Route("/classify", "POST", label)]
        logins = Logins(accounts, clock=clock or Clock(), penalty=0)
        server = Router(routes, Access.of("127.0.0.1", [], token), logins)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(server), base_url=url
        ) as browser:
            await steps(browser)

    asyncio.run(run())


def test_what_needs_a_login_knows_who_has_logged_in_until_they_leave(accounts: Accounts) -> None:
    async def steps(browser: httpx.AsyncClient) -> None:
        assert (await browser.post("/label")).status_code == 401
        assert (await browser.get("/login")).json() == {"name": "", "possible": True}
        assert (await browser.post("/login", json=MIA)).json() == {"name": "mia"}
        assert (await browser.get("/login")).json() == {"name": "mia", "possible": True}
        assert (await browser.post("/label")).json() == {"by": "mia"}
        kept = dict(browser.cookies)
        await browser.delete("/login")
        assert not browser.cookies
        browser.cookies.update(kept)  # a copy of the cookie is worth nothing then
        assert (await browser.post("/label")).status_code == 401

    visit(accounts, steps)


@pytest.mark.parametrize("given", [MIA | {"password": "wrong horse"}, MIA | {"name": "tom"}])
def test_a_wrong_name_and_a_wrong_password_are_told_alike(
    accounts: Accounts, given: dict[str, str]
) -> None:
    async def steps(browser: httpx.AsyncClient) -> None:
        answer = await browser.post("/login", json=given)
        assert (answer.status_code, answer.json()["error"]) == (403, "name or password is wrong")
        assert not browser.cookies

    visit(accounts, steps)


def test_the_cookie_is_for_this_server_alone(accounts: Accounts) -> None:
    async def steps(browser: httpx.AsyncClient) -> None:
        secure = {"host": "line.localhost", "origin": "https://line.localhost"}
        cookies = [
            (await browser.post("/login", json=MIA, headers=headers)).headers["set-cookie"]
            for headers in ({}, secure)
        ]
        for cookie in cookies:
            assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        assert [cookie.partition("=")[0] for cookie in cookies] == [
            "edge-node-8080",
            "edge-node-default",
        ]
        assert ["Secure" in cookie for cookie in cookies] == [False, True]

    visit(accounts, steps)


def test_another_site_can_neither_log_in_nor_use_a_session(accounts: Accounts) -> None:
    async def steps(browser: httpx.AsyncClient) -> None:
        elsewhere = {"origin": "http://evil.example"}
        assert (await browser.post("/login", json=MIA, headers=elsewhere)).status_code == 403
        # what a form of any site can send
        assert (await browser.post("/login", data=MIA)).status_code == 415
        await browser.post("/login", json=MIA)
        assert (await browser.post("/label", headers=elsewhere)).status_code == 403

    visit(accounts, steps)


def test_a_session_ends_when_it_is_not_used_and_goes_on_while_it_is(accounts: Accounts) -> None:
    clock = Clock()

    async def steps(browser: httpx.AsyncClient) -> None:
        await browser.post("/login", json=MIA)
        for _ in range(3):
            clock.now += SESSION - 1
            assert (await browser.post("/label")).status_code == 200
        clock.now += SESSION + 1
        assert (await browser.post("/label")).status_code == 401

    visit(accounts, steps, clock)


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": "mia", "x": ' + 200_000 * b"[",
        b'{"x": ' * 150_000,
        b'{"name": "mia", "password": "' + 9000 * b"\xff" + b'"}',
        b'{"name": ' + 5000 * b"1" + b', "password": ""}',
        b'{"name": "mia", "password": "\\ud800 horse"}',
    ],
)
def test_hostile_json_is_the_clients_mistake(accounts: Accounts, body: bytes) -> None:
    async def steps(browser: httpx.AsyncClient) -> None:
        headers = {"content-type": "application/json"}
        answer = await browser.post("/login", content=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["remedy"]

    visit(accounts, steps)


@pytest.mark.parametrize("change", ["removed", "new password"])
def test_who_is_removed_or_has_a_new_password_has_no_session_any_more(
    accounts: Accounts, change: str
) -> None:
    async def steps(browser: httpx.AsyncClient) -> None:
        await browser.post("/login", json=MIA)
        accounts.remove("mia") if change == "removed" else accounts.set("mia", "another horse")
        assert (await browser.post("/label")).status_code == 401

    visit(accounts, steps)


def test_a_crowd_that_guesses_is_turned_away(accounts: Accounts) -> None:
    async def steps(browser: httpx.AsyncClient) -> None:
        guesses = [
            browser.post("/login", json=MIA | {"password": str(number)}) for number in range(8)
        ]
        answers = await asyncio.gather(*guesses)
        assert sorted(answer.status_code for answer in answers) == 4 * [403] + 4 * [503]
        assert (await browser.post("/login", json=MIA)).status_code == 200

    visit(accounts, steps)


def test_a_login_does_not_need_the_token_of_programs_nor_stand_in_for_it(
    accounts: Accounts,
) -> None:
    async def steps(browser: httpx.AsyncClient) -> None:
        assert (await browser.post("/login", json=MIA)).status_code == 200
        assert (await browser.post("/label")).status_code == 200
        assert (await browser.post("/classify")).status_code == 401

    visit(accounts, steps, token="a secret")  # noqa: S106


@pytest.mark.parametrize("content", [b"", b"[]", b'{"mia": 1}', b"\xff"])
def test_a_damaged_file_is_named_and_lets_nobody_in(accounts: Accounts, content: bytes) -> None:
    accounts.path.write_bytes(content)

    async def steps(browser: httpx.AsyncClient) -> None:
        answer = await browser.post("/login", json=MIA)
        assert answer.status_code == 500
        assert str(accounts.path) in answer.json()["error"]

    visit(accounts, steps)


@pytest.mark.parametrize(
    "cookie", ['edge-node-8080="', "edge-node-8080=\xff", "=;=;", "edge-node-8080=" + 9000 * "x"]
)
def test_a_cookie_that_is_none_of_ours_is_no_session(accounts: Accounts, cookie: str) -> None:
    async def steps(browser: httpx.AsyncClient) -> None:
        answer = await browser.post("/label", headers={"cookie": cookie.encode("latin-1")})  # type: ignore[dict-item]
        assert answer.status_code == 401

    visit(accounts, steps)


@pytest.mark.parametrize(
    "others",
    ['theme={"dark": 1}; {}', "a b=c; {}", "{}; edge-node-8080=guessed", "edge-node-8080=; {}"],
)
def test_a_session_is_found_among_cookies_of_other_programs(
    accounts: Accounts, others: str
) -> None:
    """A browser sends a host's cookies to each of its ports."""

    async def steps(browser: httpx.AsyncClient) -> None:
        await browser.post("/login", json=MIA)
        (own,) = (f"{name}={value}" for name, value in browser.cookies.items())
        browser.cookies.clear()
        headers = {"cookie": others.replace("{}", own)}
        assert (await browser.post("/label", headers=headers)).status_code == 200

    visit(accounts, steps)


def test_no_cookie_is_unquoted_which_takes_quadratic_time(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single header of 62 kB once stopped a line for 20 seconds."""

    def unquote(value: str) -> str:
        raise AssertionError(value[:20])

    monkeypatch.setattr(http.cookies, "_unquote", unquote)

    async def steps(browser: httpx.AsyncClient) -> None:
        headers = {"cookie": 'edge-node-8080="' + 15_000 * "\\000" + '"'}
        assert (await browser.request("GET", "/login", headers=headers)).json()["name"] == ""
        assert (await browser.request("DELETE", "/login", headers=headers)).status_code == 200

    visit(accounts, steps)


def test_passwords_are_kept_as_hashes_that_only_their_owner_can_read(accounts: Accounts) -> None:
    accounts.set("tom", "battery staple")
    assert accounts.path.stat().st_mode & 0o777 == 0o600
    assert b"battery" not in accounts.path.read_bytes()
    assert all(found.startswith("$argon2id$") for found in accounts.read().values())


def test_short_passwords_impossible_names_and_strangers_are_refused(accounts: Accounts) -> None:
    with pytest.raises(UsageError, match="fewer than 8"):
        accounts.set("tom", "1234567")
    with pytest.raises(UsageError, match="login's name"):
        accounts.set("tom/..", "battery staple")
    with pytest.raises(UsageError, match="tom"):
        accounts.remove("tom")


def test_the_command_reads_the_password_from_a_pipe_and_never_says_it(tmp_path: Path) -> None:
    runner, where = CliRunner(), ["--state", str(tmp_path / "state")]
    made = runner.invoke(app, ["user", "mia", *where], input="correct horse\n")
    assert made.exit_code == 0, made.output
    assert "horse" not in made.output
    assert list(Accounts(tmp_path / "state").read()) == ["mia"]
    assert runner.invoke(app, ["user", "mia", "--remove", *where]).exit_code == 0
    assert Accounts(tmp_path / "state").read() == {}
