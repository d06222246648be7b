"""Settings of a connection to an OPC UA server, which sources and sinks share,
and that connection (extra `opcua`).
"""

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from msgspec import Struct

from broker_config.protocol.errors import EdgeNodeError, UsageError, abbreviate
from broker_config.security.secret_environment import read_secret

if TYPE_CHECKING:
    from asyncua import Client  # slow to import, and only there with the extra

_TIMEOUT = 4.0  # seconds for each request
_SESSION = 60_000  # milliseconds after which the server forgets a session whose connection was lost

_log = logging.getLogger(__name__)


class OpcUaSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's address, who we are there, and the PEM files with which the connection is
    signed and encrypted.
    """

    url: str
    user: str | None = None
    secret: str | None = None  # the environment variable that holds the user's password
    cert: str | None = None
    key: str | None = None
    server_cert: str | None = None  # the server's own

    def check(self, *nodes: str) -> None:
        """UsageError unless asyncua is installed, and the address, these nodes' ids,
        secret and files can be used.
        """
        if importlib.util.find_spec("asyncua") is None:
            raise UsageError(
                "OPC UA needs asyncua, which is not installed here",
                "install it: pip install 'edge-node[opcua]'",
            )
        if not self.url.startswith("opc.tcp://") or "@" in self.url:
            raise UsageError(
                f"there can be no OPC UA server at {self.url.rpartition('@')[2]!r}",
                "write opc.tcp://HOST:4840; `user` names the user, `secret` the environment "
                "variable of the password",
            )
        for node in nodes:
            _check_node(node)
        self._password()
        if self.user and not self.cert:
            _log.warning(
                "the password of %s may travel in clear to %s; encrypt with cert, key and "
                "server_cert",
                self.user,
                self.url,
            )
        files = (self.cert, self.key, self.server_cert)
        if any(files) and not all(files):
            raise UsageError(
                "an encrypted OPC UA connection takes cert, key and server_cert together",
                "name all three PEM files; server_cert is the server's own certificate",
            )
        for file in (self.cert, self.server_cert):
            if file:
                _application_uri(Path(file))
        if self.key and not Path(self.key).is_file():
            raise UsageError(
                f"there is no key {self.key}", "name the PEM file of the certificate's private key"
            )

    async def connect(self) -> "Client":
        """A session at the server, encrypted by Basic256Sha256 if there are certificates.

        Raises:
            EdgeNodeError: it cannot be had, and what to do.
        """
        from asyncua import Client, ua  # noqa: PLC0415
        from asyncua.crypto.security_policies import SecurityPolicyBasic256Sha256  # noqa: PLC0415
        from asyncua.crypto.uacrypto import CertProperties  # noqa: PLC0415

        # what matters of it we say ourselves, once
        logging.getLogger("asyncua").setLevel(logging.CRITICAL)
        client = Client(self.url, timeout=_TIMEOUT)
        client.name = "edge-node"
        client.session_timeout = _SESSION
        if self.user:
            client.set_user(self.user)
            client.set_password(self._password())
        try:
            if self.cert and self.key and self.server_cert:
                client.application_uri = _application_uri(Path(self.cert))
                cert, key, server = (
                    CertProperties(each, "pem") for each in (self.cert, self.key, self.server_cert)
                )
                await client.set_security(
                    SecurityPolicyBasic256Sha256, cert, key, server_certificate=server
                )
            await client.connect()
        except (OSError, ValueError, ua.UaError) as error:
            raise self._explain(error) from error
        return client

    def _password(self) -> str:
        if self.user and not (self.secret and read_secret(self.secret)):
            variable = self.secret or "secret"
            raise UsageError(
                f"the OPC UA password of {self.user} is missing: there is no {variable} in the "
                "environment",
                'write secret = "NAME", and set that environment variable to the password',
            )
        return read_secret(self.secret) or "" if self.secret else ""

    def _explain(self, error: Exception) -> EdgeNodeError:
        name = type(error).__name__
        if name in ("BadUserAccessDenied", "BadIdentityTokenRejected", "BadIdentityTokenInvalid"):
            who = f"user {self.user}" if self.user else "a client without a user"
            return EdgeNodeError(
                f"{self.url} does not let in {who} ({name})",
                "correct user and password, or admit the user there",
            )
        if name.startswith(("BadSecurity", "BadCertificate")) or "No matching endpoints" in str(
            error
        ):
            return EdgeNodeError(
                f"{self.url} takes no connection that is secured so: {name}",
                "let it trust our certificate and offer Basic256Sha256 with SignAndEncrypt, and "
                "check server_cert; without certificates it must offer None",
            )
        if isinstance(error, OSError):
            return EdgeNodeError(
                f"no OPC UA server answers at {self.url}: {abbreviate(str(error)) or name}",
                "check host, port and firewall, and that the server runs",
            )
        return EdgeNodeError(
            f"{self.url} does not let us connect: {abbreviate(str(error)) or name}",
            "check that an OPC UA server is there, and what its own log says",
        )


def _check_node(node: str) -> None:
    from asyncua import ua  # noqa: PLC0415

    try:
        ua.NodeId.from_string(node)
    except ua.UaError as error:
        raise UsageError(
            f"{node!r} is no OPC UA node id",
            "write it as the server's browser shows it: ns=2;s=Name or ns=2;i=1001",
        ) from error


def _application_uri(cert: Path) -> str:
    """The name of the application for which a certificate was made;
    the client must give the same.
    """
    try:
        found = x509.load_pem_x509_certificate(cert.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return names.get_values_for_type(x509.UniformResourceIdentifier)[0]
    except (OSError, ValueError, x509.ExtensionNotFound, IndexError) as error:
        raise UsageError(
            f"{cert} cannot be used for OPC UA: {error or 'it names no application URI'}",
            "take a PEM certificate that has the application's URI among its subject "
            "alternative names",
        ) from error
