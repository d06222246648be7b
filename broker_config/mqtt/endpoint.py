"""Address of the broker and our credentials there, read from a URL or a kit."""

import difflib
import logging
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast
from urllib.parse import SplitResult, unquote, urlsplit

from broker_config.protocol.errors import UsageError
from broker_config.security.secret_environment import PASSWORD, read_secret

if TYPE_CHECKING:
    from broker_config.security.kit import Kit
    from broker_config.security.message_encryption import MessageEncryption
    from broker_config.security.message_signing import MessageSigner

log = logging.getLogger(__name__)

PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}


@dataclass(frozen=True)
class Endpoint:
    """The broker's address and our credentials there."""

    scheme: str
    host: str
    port: int
    path: str = "/mqtt"  # of WebSockets
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    kit: "Kit | None" = None  # instead of ca, cert and key
    # of messages in the kit's federation
    signer: "MessageSigner | None" = field(default=None, compare=False)
    # of this process's part in a run
    encryption: "MessageEncryption | None" = field(default=None, compare=False)

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        username: str | None = None,
        password: str | None = None,
    ) -> Self:
        """Read `mqtt|mqtts|ws|wss://[user[:password]@]host[:port][/path]`;
        UsageError says what is wrong with it.

        The password may also stand in the environment, as EDGE_NODE_PASSWORD. `ca`, `cert` and
        `key` are PEM files.
        """
        scheme, parts = _split(url)
        if parts.password:
            log.warning(
                "the password in the broker's address can be read by others on this machine; "
                "set %s",
                PASSWORD,
            )
        username = username or (parts.username and unquote(parts.username)) or None
        password = password or (parts.password and unquote(parts.password)) or None
        if password and not username:
            raise UsageError(
                f"there is a password for {parts.hostname}, but no user name",
                "give the user name too",
            )
        if scheme in ("mqtt", "ws") and (ca or cert or key):
            raise UsageError(
                f"certificates mean nothing to {scheme}://", f"use {scheme}s:// or leave them out"
            )
        if bool(cert) != bool(key):
            raise UsageError("certificate and key belong together", "give both or neither")
        if username and not password:
            password = read_secret(PASSWORD)
        has_path = parts.path not in ("", "/")
        path = parts.path if has_path else "/mqtt"
        ca_path = Path(ca) if ca else None
        cert_path = Path(cert) if cert else None
        key_path = Path(key) if key else None
        return cls(
            scheme=scheme,
            host=cast(str, parts.hostname),
            port=parts.port or PORTS[scheme],
            path=path,
            username=username,
            password=password or None,
            ca=ca_path,
            cert=cert_path,
            key=key_path,
        )

    @classmethod
    def from_kit(cls, kit: "Kit", url: str | None = None, *, with_signer: bool = True) -> Self:
        """The broker of a kit, or the one at `url`, and its member's identity there.

        Raises:
            UsageError: the URL is not for TLS; `with_signer`: the kit's member list is not valid
                any more.
        """
        # Only a kit needs cryptography
        from broker_config.security.message_signing import MessageSigner  # noqa: PLC0415

        endpoint = cls.parse(url or kit.broker)
        if not endpoint.tls:
            raise UsageError(
                f"with a kit the connection is encrypted, but not to {endpoint}",
                "use mqtts:// or wss://, or no URL",
            )
        signer = MessageSigner(kit) if with_signer else None
        return replace(endpoint, kit=kit, signer=signer)

    def encrypting(self, encryption: "MessageEncryption") -> Self:
        """The same broker, as this encryption's process reaches it.

        UsageError if messages are not even signed.
        """
        if self.signer is None:
            raise UsageError(
                "messages can be encrypted for a federation's members only if each has a kit",
                "take a kit (--kit), or have the federation coordinated with --encryption none",
            )
        return replace(self, encryption=encryption)

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme in ("mqtts", "wss")

    @property
    def websocket(self) -> bool:
        """Whether MQTT travels inside a WebSocket."""
        return self.scheme in ("ws", "wss")

    def tls_context(self) -> ssl.SSLContext:
        """Return the context that verifies the broker and shows our certificate;
        UsageError if a file is unusable.
        """
        if self.kit:
            return self.kit.tls_context()
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            files = ", ".join(str(file) for file in (self.ca, self.cert, self.key) if file)
            raise UsageError(
                f"cannot use {files}: {error}", "check that these are readable PEM files"
            ) from None
        return context

    def __str__(self) -> str:
        user = f"{self.username}@" if self.username else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        path = self.path if self.websocket else ""
        return f"{self.scheme}://{user}{host}:{self.port}{path}"


def _split(url: str) -> tuple[str, SplitResult]:
    form = (
        "write it as mqtt://HOST, mqtts://HOST, ws://HOST/PATH or wss://HOST/PATH, with :PORT "
        "after HOST if needed"
    )
    scheme, separator, _ = url.partition("://")
    if not separator:
        user, at, place = url.rpartition("@")
        shown = f"{user.partition(':')[0]}{at}{place}"
        raise UsageError(
            f"the broker's address {shown!r} has no scheme", f"did you mean mqtt://{shown}?"
        )
    if scheme not in PORTS:
        nearest = difflib.get_close_matches(scheme, PORTS, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"{scheme}:// is no way to reach a broker", f"did you mean {nearest}://? Else {form}"
        )
    try:
        parts = urlsplit(url)
        usable = (
            bool(parts.hostname)
            and parts.port != 0
            and not (parts.query or parts.fragment or "@" in parts.path)
        )
    except ValueError:
        usable = False
    if not usable or (scheme in ("mqtt", "mqtts") and parts.path not in ("", "/")):
        raise UsageError(f"the broker's address {url.rpartition('@')[2]!r} cannot be read", form)
    return scheme, parts
