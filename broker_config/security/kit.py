"""A member's kit: one encrypted file with all that it needs to take part in a federation."""

import contextlib
import getpass
import os
import re
import secrets
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from msgspec import Meta, Struct

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Name
from broker_config.security import member_list
from broker_config.security.answer import Answer
from broker_config.security.received_file import read_json
from broker_config.security.secret_environment import PASSPHRASE, read_secret
from broker_config.security.signing import group_letters
from broker_config.storage import disk

_FORMAT = 1
_COST = 2**15  # of scrypt, with blocks of 8 KB: 32 MB, about a tenth of a second
_AGAIN = (
    "copy the file again, or ask whoever provisions the federation for another (of your own "
    "keys: a new request)"
)
_GENERATED = re.compile(r"[a-z2-7]{5}(-[a-z2-7]{5}){4}")


class PassphraseError(UsageError):
    """A passphrase that does not open the kit."""


class Keys(Struct, frozen=True, kw_only=True):
    """A member's private keys: content of its kit before its request is answered.

    Its repr shows no secret.
    """

    federation: Name
    name: Name
    key: str  # PEM, of its TLS certificate
    signing: bytes  # of its signatures

    def __repr__(self) -> str:
        return f"Keys({self.federation}, {self.name})"


class Kit(Answer, frozen=True, kw_only=True):
    """Content of a kit: what the authority has answered, and the member's private keys.

    Its repr shows no secret.
    """

    key: str  # PEM, the certificate's private key
    # the private key of the member's signatures; may be empty: a monitor signs nothing
    signing: bytes

    def __repr__(self) -> str:
        return f"Kit({self.federation}, {self.name})"

    def expires(self) -> datetime:
        """When the certificate ends."""
        return x509.load_pem_x509_certificate(self.certificate.encode()).not_valid_after_utc

    def tls_context(self) -> ssl.SSLContext:
        """The context that verifies the broker and shows our certificate.

        The private key is written to no file.

        Raises:
            UsageError: the certificate has expired.
        """
        if (end := self.expires()) < datetime.now(UTC):
            raise UsageError(
                f"the certificate of {self.name} has expired on {end:%Y-%m-%d}",
                "ask whoever provisions the federation for a new kit or answer (edge-node "
                "provision --renew)",
            )
        context = ssl.create_default_context(cadata=self.ca)
        with os.fdopen(os.memfd_create(self.name), "w") as file:
            file.write(self.certificate + self.key)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context

    def members(self) -> member_list.MemberList:
        """The federation's members. MemberListError if the list cannot be relied on."""
        return member_list.verify(self.charter, self.authority, f"the kit of {self.name}")


class _EncryptedKit(Struct, frozen=True, kw_only=True):
    """A kit on disk: what may be known of it without the passphrase,
    and the rest encrypted with AES-256-GCM.
    """

    edge_node_kit: int
    federation: Name
    name: Name
    salt: Annotated[bytes, Meta(min_length=16, max_length=16)]
    nonce: Annotated[bytes, Meta(min_length=12, max_length=12)]
    content: bytes


def write(path: Path, kit: Kit | Keys, passphrase: str) -> None:
    """Write a kit, or what it has before an answer, for its owner alone.

    EdgeNodeError if the disk does not take it.
    """
    salt = secrets.token_bytes(16)
    nonce = secrets.token_bytes(12)
    cipher = AESGCM(_derive(passphrase, salt))
    content = cipher.encrypt(
        nonce, msgspec.json.encode(kit), _authenticated_data(kit.federation, kit.name)
    )
    encrypted = _EncryptedKit(
        edge_node_kit=_FORMAT,
        federation=kit.federation,
        name=kit.name,
        salt=salt,
        nonce=nonce,
        content=content,
    )
    with disk.writing(path.parent):
        disk.replace_bytes(path, msgspec.json.format(msgspec.json.encode(encrypted)), mode=0o600)


def read(path: Path, passphrase: str) -> Kit:
    """Open a kit.

    Raises:
        PassphraseError: the passphrase is wrong, or what it encrypts was damaged.
        UsageError: it is no kit, or its request was not answered yet.
    """
    found = read_keys(path, passphrase)
    if isinstance(found, Keys):
        raise UsageError(
            f"{path} holds the keys of {found.name}, but no certificate yet",
            f"send its request to whoever provisions {found.federation}; "
            f"then edge-node request {found.federation} {found.name} --accept ANSWER",
        )
    return found


def read_keys(path: Path, passphrase: str) -> Kit | Keys:
    """As `read`, but a kit whose request was not answered yet is only its keys."""
    encrypted = _read(path)
    try:
        content = AESGCM(_derive(passphrase, encrypted.salt)).decrypt(
            encrypted.nonce,
            encrypted.content,
            _authenticated_data(encrypted.federation, encrypted.name),
        )
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.json.decode(content, type=Kit)
        return msgspec.json.decode(content, type=Keys)
    except (InvalidTag, msgspec.MsgspecError):
        raise PassphraseError(
            f"the passphrase does not open {path}, or the file is damaged",
            "check the passphrase, which came with the kit: passphrases.txt of whoever "
            f"provisions, or {PASSPHRASE} beside a request; else {_AGAIN}",
        ) from None


def _read(path: Path) -> _EncryptedKit:
    """Read the file without decrypting it. UsageError if it is no kit."""
    encrypted = read_json(path, _EncryptedKit, "kit", _AGAIN)
    if encrypted.edge_node_kit != _FORMAT:
        raise UsageError(
            f"{path} is a kit of another version of edge-node", "upgrade edge-node here"
        )
    return encrypted


def ask_passphrase(path: Path) -> str:
    """The passphrase of a kit: from a variable of the environment,
    else from whoever sits at the terminal.

    Raises:
        UsageError: there is neither; or it is no kit, and no passphrase would open it.
    """
    _read(path)
    if found := read_secret(PASSPHRASE):
        return found
    if not sys.stdin.isatty():
        raise UsageError(
            f"the kit {path} needs its passphrase", f"set {PASSPHRASE}, or start in a terminal"
        )
    return getpass.getpass(f"passphrase of {path}: ", stream=sys.stderr)


def new_passphrase() -> str:
    """A random passphrase: 25 letters and digits (125 bits), in groups of five to be read out."""
    return group_letters(secrets.token_bytes(16))


def _derive(passphrase: str, salt: bytes) -> bytes:
    given = passphrase.strip()
    # these have no capital letters, whatever somebody types
    if _GENERATED.fullmatch(given.lower()):
        given = given.lower()
    return Scrypt(salt=salt, length=32, n=_COST, r=8, p=1).derive(given.encode())


def _authenticated_data(federation: str, name: str) -> bytes:
    """The authenticated data: not encrypted, but protected from changes."""
    return f"edge-node kit {_FORMAT} {federation} {name}".encode()
