"""Outcomes to a web server, as POST requests."""

import http.client
import ssl
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta, Struct

from broker_config.protocol.errors import UsageError
from broker_config.security.secret_environment import read_secret
from edge.config.instance import Instance
from edge.sinks.sink import Item, Origin, Refused, SinkDown, to_json

# statuses that concern this outcome, and would be the same next time
_REJECTED = (400, 406, 413, 415, 422)
_MAX_RESPONSE = 1 << 16  # bytes that are read; nothing in them matters
_MAX_RETRY_AFTER = 300.0  # seconds; a longer Retry-After is cut to that


class Settings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="webhook"
):
    """`[[sinks]] kind = "webhook"`: a JSON object for each outcome,
    or an array of up to `batch`.
    """

    url: str
    batch: Annotated[int, Meta(ge=1, le=256)] = 1
    timeout: Annotated[float, Meta(gt=0)] = 10.0  # seconds
    # the environment variable, or systemd credential, that is sent as Authorization
    secret: str | None = None
    ca: str | None = None  # PEM file of the authority that signed the server's certificate

    def open_sink(self, instance: Instance, origin: Origin) -> "Webhook":
        """Open the sink."""
        return Webhook(self)


class Webhook:
    """Posts outcomes in order, repeated until the server answers with success;
    each request has an Idempotency-Key.

    Redirects are not followed: what an image shows goes only to the address in the settings.
    """

    def __init__(self, settings: Settings) -> None:
        """UsageError when the address, the secret or the certificate cannot be used."""
        self.name = f"webhook:{settings.url.partition('?')[0]}"
        self._url = _split(settings.url)
        self._settings = settings
        self._headers = {"Content-Type": "application/json", "User-Agent": "edge-node"}
        if settings.secret:
            self._headers["Authorization"] = _secret(settings.secret)
        self._context = _context(settings.ca) if self._url.scheme == "https" else None

    def deliver(self, items: Sequence[Item]) -> None:
        """Post them over one connection."""
        delivered = 0
        connection = self._connection()
        try:
            while delivered < len(items):
                delivered += self._post(
                    connection, items[delivered : delivered + self._settings.batch]
                )
        except Refused as refused:
            raise Refused(str(refused), delivered) from refused
        except SinkDown as down:
            raise SinkDown(str(down), delivered, down.retry_after) from down
        except (OSError, http.client.HTTPException) as error:
            raise SinkDown(f"{type(error).__name__}: {error}", delivered) from error
        finally:
            connection.close()

    def close(self) -> None:
        """Nothing to close."""

    def _connection(self) -> http.client.HTTPConnection:
        host = self._url.hostname or ""
        port = self._url.port
        timeout = self._settings.timeout
        if self._context:
            return http.client.HTTPSConnection(host, port, timeout=timeout, context=self._context)
        return http.client.HTTPConnection(host, port, timeout=timeout)

    def _post(self, connection: http.client.HTTPConnection, items: Sequence[Item]) -> int:
        """How many the server has accepted: all, or just the first when it rejects the batch."""
        bodies = [to_json(item) for item in items]
        body = bodies[0] if self._settings.batch == 1 else b"[%b]" % b",".join(bodies)
        key = "-".join(dict.fromkeys((items[0].outcome.id, items[-1].outcome.id)))
        target = self._url._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.request("POST", target, body, self._headers | {"Idempotency-Key": key})
        response = connection.getresponse()
        if len(response.read(_MAX_RESPONSE)) == _MAX_RESPONSE:
            connection.close()  # the next request opens another
        if response.status // 100 == 2:
            return len(items)
        why = f"{response.status} {response.reason}"
        if response.status not in _REJECTED:
            raise SinkDown(why, retry_after=_retry_after(response.headers.get("Retry-After", "")))
        if len(items) == 1:
            raise Refused(why)
        return self._post(connection, items[:1])


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not parts.username
        )
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(
            f"a webhook cannot go to {url.rpartition('@')[2]!r}",
            "write it as https://HOST/PATH; a secret belongs into an environment variable that "
            "`secret` names",
        )
    return parts


def _secret(variable: str) -> str:
    if not (value := read_secret(variable)):
        raise UsageError(
            f"the webhook's secret is missing: there is no {variable} in the environment",
            f"set {variable} to what the server expects as Authorization, such as 'Bearer ...'",
        )
    return value


def _context(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise UsageError(
            f"cannot use {ca}: {error}", "check that it is a readable PEM file"
        ) from error


def _retry_after(text: str) -> float:
    """Seconds; a date, which few servers send, is ignored."""
    return min(float(text), _MAX_RETRY_AFTER) if text.isdigit() else 0.0
