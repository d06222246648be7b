"""Who may change something logs in; the session is a cookie that no other person or site has,
can guess or use.
"""

import ast
import asyncio
import fcntl
import http.cookies
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import argon2
import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from typer.testing import CliRunner

from broker_config.protocol.errors import UsageError
from edge.bundle.verification import Verifier
from edge.http.access import Access
from edge.http.login import SESSION, Accounts, Logins
from edge.http.request import json_response
from edge.http.web_app import Route, WebApp, user_of
from edge.registry import bundle_store
from edge_node.cli.main import app
from tests.support.federation_keys import FederationKeys
from tests.support.paths import REPOSITORY
from tests.support.plants import here

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
    crowd: int = 0,
    crowd_address: str = "192.0.2.9",
) -> None:
    """Take steps in a browser of a server on which only those who have logged in may label.

    As soon as the browser has asked for the first time, a crowd sends so many wrong passwords at
    once, again and again, until the steps are done.
    """

    async def label(request: Request) -> Response:
        return json_response({"by": user_of(request).name})

    async def run() -> None:
        routes = [Route("/label", "POST", label, "login"), Route("/classify", "POST", label)]
        logins = Logins(accounts, clock=clock or Clock(), penalty=0)
        server = WebApp(routes, Access.of("127.0.0.1", [], token), logins)
        stranger = httpx.ASGITransport(server, client=(crowd_address, 1))
        transport = httpx.ASGITransport(server, client=("192.0.2.1", 1))

        async def guess(visitor: httpx.AsyncClient) -> None:
            while True:
                await visitor.post("/login", json=MIA | {"password": "a guess"})
                await asyncio.sleep(0.01)  # as over a network

        async with (
            httpx.AsyncClient(transport=transport, base_url=url) as browser,
            httpx.AsyncClient(transport=stranger, base_url=url) as visitor,
        ):
            guesses = [asyncio.create_task(guess(visitor)) for _ in range(crowd)]
            try:
                await steps(browser)
            finally:
                for each in guesses:
                    each.cancel()

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
        assert "edge-node-8080" not in browser.cookies
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
        cookies = []
        for headers in ({}, secure):
            answer = await browser.post("/login", json=MIA, headers=headers)
            cookies += answer.headers.get_list("set-cookie")
        for cookie in cookies:
            assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert [cookie.partition("=")[0] for cookie in cookies] == [
            "edge-node-8080",
            "edge-node-8080-known",
            "edge-node-default",
            "edge-node-default-known",
        ]
        assert ["Secure" in cookie for cookie in cookies] == [False, False, True, True]
        # a session ends with the browser
        assert ["Max-Age" in cookie for cookie in cookies] == [False, True, False, True]

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


def test_a_crowd_elsewhere_keeps_nobody_from_logging_in(accounts: Accounts) -> None:
    """Eight connections that guessed without a pause once kept everybody out."""

    async def steps(browser: httpx.AsyncClient) -> None:
        for _ in range(3):
            browser.cookies.clear()
            await asyncio.sleep(0.1)  # the crowd is there before
            assert (await browser.post("/login", json=MIA)).status_code == 200

    visit(accounts, steps, crowd=20)


def test_a_crowd_behind_the_same_proxy_keeps_no_known_browser_from_logging_in(
    accounts: Accounts,
) -> None:
    async def steps(browser: httpx.AsyncClient) -> None:
        answer = await browser.post("/login", json=MIA)  # before the crowd
        assert answer.status_code == 200
        await asyncio.sleep(0.1)  # the crowd is there before
        await browser.delete("/login")
        assert (await browser.post("/login", json=MIA)).status_code == 200

    visit(accounts, steps, crowd=20, crowd_address="192.0.2.1")


@pytest.mark.parametrize("change", ["another name", "new password"])
def test_a_browser_is_known_for_the_person_and_password_that_has_logged_in_there(
    accounts: Accounts, change: str
) -> None:
    """Else one login would let anybody guess without waiting for others."""
    accounts.set("tom", "battery staple")

    async def steps(browser: httpx.AsyncClient) -> None:
        await browser.post("/login", json=MIA)
        if change == "new password":
            accounts.set("mia", "another horse")
        name = "mia" if change == "new password" else "tom"
        request = Request(
            {
                "type": "http",
                "headers": [
                    (b"host", b"localhost:8080"),
                    (b"cookie", "; ".join(f"{k}={v}" for k, v in browser.cookies.items()).encode()),
                ],
            }
        )
        logins = Logins(accounts)
        assert not await logins._is_known(name, request)

    visit(accounts, steps)


def test_a_login_counts_in_the_folders_in_whose_accounts_it_stands(tmp_path: Path) -> None:
    steel = Accounts(tmp_path / "steel")
    brass = Accounts(tmp_path / "brass")
    steel.set("anna", "correct horse")
    brass.set("anna", "another horse")
    brass.set("bert", "battery staple")

    async def folders(name: str, password: str) -> list[str] | int:
        async def where(request: Request) -> Response:
            return json_response(sorted(each.name for each in user_of(request).folders))

        routes = [Route("/where", "POST", where, "login")]
        server = WebApp(routes, logins=Logins(steel, brass, penalty=0))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(server), base_url="http://localhost"
        ) as browser:
            answer = await browser.post("/login", json={"name": name, "password": password})
            if answer.status_code != 200:
                return answer.status_code
            found: list[str] = (await browser.post("/where")).json()
            return found

    assert asyncio.run(folders("anna", "correct horse")) == ["steel"]
    assert asyncio.run(folders("anna", "another horse")) == ["brass"]
    assert asyncio.run(folders("bert", "battery staple")) == ["brass"]
    assert asyncio.run(folders("bert", "correct horse")) == 403
    brass.set("anna", "correct horse")
    assert asyncio.run(folders("anna", "correct horse")) == ["brass", "steel"]


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


def test_nobody_reads_cookies_as_starlette_does() -> None:
    """Its parser calls the same quadratic function, at the first use of `request.cookies`."""
    for room in ("edge", "trainer/console"):
        for path in (REPOSITORY / room).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            names = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
            assert "cookies" not in names, path


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
        own = f"edge-node-8080={browser.cookies['edge-node-8080']}"
        browser.cookies.clear()
        headers = {"cookie": others.replace("{}", own)}
        assert (await browser.post("/label", headers=headers)).status_code == 200

    visit(accounts, steps)


def test_no_cookie_is_unquoted_which_takes_quadratic_time(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single header of 62 kB once stopped a line for 20 seconds."""

    def load(_: object, given: object) -> None:
        raise AssertionError(str(given)[:20])

    monkeypatch.setattr(http.cookies.BaseCookie, "load", load)

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


def test_who_is_removed_while_another_password_is_set_stays_removed(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash takes a tenth of a second: here it takes until bob is removed."""
    accounts.set("bob", "battery staple")
    is_hashing = threading.Event()
    is_removed = threading.Event()
    hash_password = argon2.PasswordHasher.hash

    def hash_slowly(self: argon2.PasswordHasher, password: str) -> str:
        is_hashing.set()
        assert is_removed.wait(60)
        return hash_password(self, password)

    monkeypatch.setattr(argon2.PasswordHasher, "hash", hash_slowly)
    with ThreadPoolExecutor() as threads:
        setting = threads.submit(accounts.set, "mia", "another horse")
        assert is_hashing.wait(60)
        accounts.remove("bob")
        is_removed.set()
        setting.result()
    assert [*accounts.read()] == ["mia"]


def test_who_shall_log_in_no_more_is_removed_while_a_new_bundle_is_tried(
    accounts: Accounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line's memory of bundles, which is in the same folder, is locked for minutes then."""
    accounts.set("bob", "battery staple")
    keys = FederationKeys()
    flock = fcntl.flock
    with Verifier(keys.trust(), accounts.path.parent).admit(keys.bundle(tmp_path / "bundle")):
        monkeypatch.setattr(fcntl, "flock", lambda file, how: flock(file, how | fcntl.LOCK_NB))
        accounts.remove("bob")
    assert [*accounts.read()] == ["mia"]


def test_logins_that_are_made_at_once_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argon2.PasswordHasher, "hash", lambda _, password: f"hash of {password}")
    names = [f"person-{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        made = [threads.submit(Accounts(tmp_path).set, name, "battery staple") for name in names]
        for each in made:
            each.result()
    assert sorted(Accounts(tmp_path).read()) == sorted(names)


def test_no_bit_of_the_file_makes_another_login_or_loses_one(accounts: Accounts) -> None:
    accounts.set("bob", "battery staple")
    whole = accounts.path.read_bytes()
    for position in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << position % 8
        accounts.path.write_bytes(flipped)
        with pytest.raises(UsageError, match=re.escape(str(accounts.path))):
            accounts.read()


def test_logins_without_a_checksum_hold_until_they_are_changed(accounts: Accounts) -> None:
    """As edge-node 0.1 wrote them."""
    known = accounts.read()
    accounts.path.write_bytes(msgspec.json.encode(known))
    assert accounts.read() == known
    accounts.set("bob", "battery staple")
    assert accounts.read()["mia"] == known["mia"]


def test_the_command_reads_the_password_from_a_pipe_and_never_says_it(tmp_path: Path) -> None:
    runner, where = CliRunner(), ["--state", str(tmp_path / "state")]
    made = runner.invoke(app, ["user", "mia", *where], input="correct horse\n")
    assert made.exit_code == 0, made.output
    assert "horse" not in made.output
    assert list(Accounts(tmp_path / "state").read()) == ["mia"]
    assert runner.invoke(app, ["user", "mia", "--remove", *where]).exit_code == 0
    assert Accounts(tmp_path / "state").read() == {}


def test_who_may_log_in_is_written_where_the_running_line_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    lines = [(tmp_path / "one", "line-1")]
    monkeypatch.setattr(bundle_store, "running_lines", lambda: lines)
    assert here("user", "mia", stdin="correct horse\n").returncode == 0
    assert "mia" in Accounts(tmp_path / "one").read()
    lines.append((tmp_path / "two", "line-2"))
    several = here("user", "anna", stdin="correct horse\n")
    assert several.returncode == 2
    assert f"--state {tmp_path / 'two'}" in several.stderr
