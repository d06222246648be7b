"""Access over HTTP: which web pages may reach a server through a browser, and who may post."""

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.requests import Request

from broker_config.protocol.errors import UsageError
from edge.http.request import RequestError


class Access(NamedTuple):
    """Who is served.

    A browser sends what any page tells it to, also to this machine's own addresses.

    A page cannot choose the Host and Origin that its browser sends. With a name of its own that it
    lets point to this machine it would be of our origin: so names have to be known. Addresses are
    what they are.

    Who listens on this machine alone is not called by the machine's own names either: whoever
    answers mDNS or LLMNR in the plant's network decides where these point.
    """

    names: frozenset[str]  # by which this server is called, in small letters
    # those of them that somebody gave: a reverse proxy's, from which pages may ask
    extra: frozenset[str] = frozenset()
    token: str = ""  # of whoever posts; empty: nobody needs one

    @classmethod
    def of(cls, host: str, extra: Iterable[str], token: str) -> "Access":
        """The access to a server that listens on `host`;
        UsageError when one of `extra` is no name.
        """
        given = frozenset(map(_parse_name, extra))
        names = {"localhost", host}
        if not _is_loopback(host):
            own = socket.gethostname()
            short = own.partition(".")[0]
            names |= {own, short, f"{short}.local"}
        return cls(frozenset(name.lower() for name in names) | given, given, token)

    def check(self, request: Request) -> None:
        """RequestError when it is not served."""
        if request.scope["path"].startswith("/v2/health/"):
            # a load balancer asks by a name of its own, and learns no more than whether to send
            # requests here
            return
        for name in ("host", "origin", "authorization"):
            if len(request.headers.getlist(name)) > 1:
                # a proxy before us may have looked at another one than we would
                raise RequestError(f"the request has two headers {name}", "send one of them", 400)
        host = request.headers.get("host", "").lower()
        if host and not self._is_ours(_hostname(host)):
            raise RequestError(
                f"this server is not called {host[:100]}",
                "use its address, or start it with --allow-host and that name",
                421,
            )
        origin = request.headers.get("origin", "").lower()
        if (
            origin
            and origin.partition("://")[2] != host
            and _hostname(origin.partition("://")[2]) not in self.extra
        ):
            raise RequestError(
                "a page of another origin must not use this server",
                "ask without a browser; if the page is yours, start the server with --allow-host "
                "and its name",
                403,
            )

    def check_token(self, request: Request) -> None:
        """RequestError when it changes something, and there is a token that it does not bear."""
        if not self.token or request.method in ("GET", "HEAD"):
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode("latin-1"), self.token.encode()
        ):
            raise RequestError(
                "this line takes images from whoever has its token only",
                "send it: Authorization: Bearer TOKEN",
                401,
                {"www-authenticate": "Bearer"},
            )

    def _is_ours(self, name: str) -> bool:
        if name in self.names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _is_loopback(host: str) -> bool:
    """Return whether a host to listen on is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _parse_name(given: str) -> str:
    """A name that somebody gave, with a port perhaps; UsageError when it is a URL,
    a wildcard or not in ASCII.
    """
    name = _hostname(given)
    if "/" in given or not re.fullmatch(r"[\w.:-]+", name, re.ASCII):
        raise UsageError(
            f"{given} is no name by which a line can be called",
            "give --allow-host a name alone: line.plant.example",
        )
    return name


def _hostname(host: str) -> str:
    """A host without its port, in small letters."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
