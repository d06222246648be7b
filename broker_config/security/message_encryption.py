"""Encryption of a federation's messages and chunks, end to end:
with it a broker sees who speaks when, and how much.

An encrypted message is 0x03, the key's id, a nonce, the length of its open part, the open part, the
ciphertext. What must be understood before a process has the keys is not encrypted: announcements,
and how it gets them.
"""

import secrets
import struct
from typing import NamedTuple

import msgspec

from broker_config.protocol import topics
from broker_config.protocol.codec import COMPRESSED_MARK, ENCRYPTED_MARK
from broker_config.protocol.messages import Hello, Welcome
from broker_config.security.group_key import (
    ID_BYTES,
    NONCE_BYTES,
    KeyPair,
    MasterKey,
    NodeKeys,
    Recipient,
    SharedKey,
)
from broker_config.security.signing import ForgedError, UnknownKeyError

# messages of which nothing is open, as of what is compressed
_WHOLE = {"Contribution", "Telemetry", "Accepted"}
_PARTLY = {"RoundState": ("broadcast", "delta")}  # fields that are not open, by message
_INDEX_BYTES = 4  # of a chunk, which are open
_LENGTH = struct.Struct(">I")  # of the open part
_START = len(ENCRYPTED_MARK) + ID_BYTES + NONCE_BYTES + _LENGTH.size  # of the open part


class MessageEncryption:
    """What one process encrypts before it is published, and decrypts when it has arrived,
    once it has the `keys`.
    """

    def __init__(self, keys: MasterKey | NodeKeys | None = None):
        self.keys = keys

    def _key(self, topic: str) -> SharedKey | None:
        return self.keys.of(topics.private_to(topic)) if self.keys else None

    def wire_topic(self, topic: str) -> str | None:
        """The topic as the broker knows it; None if there is no key yet,
        and it would tell a blob's digest.
        """
        if not topics.is_chunks(topic):
            return topic
        key = self._key(topic)
        return key.hide_digest(topic) if key else None

    def depends_on_keys(self, topic: str) -> bool:
        """Whether other keys give this topic another name,
        or make readable what is retained on it.
        """
        return topics.is_chunks(topic) or topic == topics.round_state(topics.federation_of(topic))

    def encrypt(self, topic: str, payload: bytes) -> tuple[str, bytes] | None:
        """Topic and payload as they are published; None if they are confidential,
        and there is no key yet.
        """
        key = self._key(topic)
        if topics.is_chunks(topic):
            if key is None:
                return None
            index = payload[:_INDEX_BYTES]
            data = payload[_INDEX_BYTES:]
            return key.hide_digest(topic), index + key.encrypt_chunk(topic, index, data)
        open_part, secret = (b"", payload) if topics.is_want(topic) else _split(payload)
        if not secret:
            return topic, payload
        if key is None:
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        header = b"".join((ENCRYPTED_MARK, key.id, nonce, _LENGTH.pack(len(open_part)), open_part))
        return topic, header + key.encrypt(topic, nonce, secret, header)

    def decrypt(self, topic: str, data: bytes) -> bytes:
        """The payload that arrived on `topic`; its open part if that is all that can be read so
        far.

        Raises:
            UnknownKeyError: it was encrypted with another key.
            ForgedError: it was not encrypted by a member.
        """
        key = self._key(topic)
        if topics.is_chunks(topic):
            if key is None:
                raise UnknownKeyError("there is no key for it yet")
            index = data[:_INDEX_BYTES]
            return index + key.decrypt_chunk(topic, index, data[_INDEX_BYTES:])
        found = _parse(data) if data.startswith(ENCRYPTED_MARK) else None
        if topics.is_want(topic) and (found is None or found.open_part):
            # nor signed: nothing else would show that a member has sent it
            raise ForgedError("it is not encrypted")
        if found is None:
            return data
        if key is None or found.key_id != key.id:
            return _require_open_part(found)
        secret = key.decrypt(topic, found.nonce, found.ciphertext, found.header)
        return _merge(found.open_part, secret) if found.open_part else secret


class CoordinatorEncryption(MessageEncryption):
    """The encryption of a coordinator's process, from whose master key all keys follow."""

    keys: MasterKey

    def __init__(self, federation: str, run: str, server: str):
        super().__init__(MasterKey.draw())
        self._federation = federation
        self._run = run
        self._server = server

    def draw_anew(self) -> None:
        """Encrypt with other keys from now on: who had those of before must not read what
        follows.
        """
        self.keys = MasterKey.draw()

    def keys_for(self, node: str, hello: Hello) -> str:
        """The keys for the sender of a Hello, as Welcome has them.

        ValueError if nobody can have the Hello's.
        """
        recipient = Recipient(self._federation, self._run, node, hello.session, self._server)
        return self.keys.encrypt_for(hello.key, recipient)


class NodeEncryption(MessageEncryption):
    """The encryption of a node's process, which is given its keys by a Welcome;
    `public` goes into its Hello.
    """

    keys: NodeKeys | None

    def __init__(self, federation: str, run: str, node: str, session: str):
        super().__init__()
        self._pair = KeyPair()
        self._federation = federation
        self._run = run
        self._node = node
        self._session = session
        self._former: set[bytes] = set()  # ids of group keys

    @property
    def public(self) -> str:
        """The key for which the coordinator encrypts the others."""
        return self._pair.public

    def take_keys(self, welcome: Welcome) -> bool:
        """Use the keys of a Welcome from now on; whether they are others than before.

        Raises:
            ForgedError: they are not for this process; or former ones, which a broker may play back
                for somebody who is no member any more.
        """
        recipient = Recipient(
            self._federation, self._run, self._node, self._session, welcome.server
        )
        keys = self._pair.decrypt(welcome.key, recipient)
        if self.keys and keys.group.id == self.keys.group.id:
            return False
        if keys.group.id in self._former:
            raise ForgedError("its group key is a former one")
        self._former.add(keys.group.id)
        self.keys = keys
        return True


def read_open_part(data: bytes) -> bytes:
    """What a reader without keys may know of a message. ForgedError if that is nothing."""
    return _require_open_part(_parse(data)) if data.startswith(ENCRYPTED_MARK) else data


class _Encrypted(NamedTuple):
    """The parts of an encrypted message; the header is all before the ciphertext."""

    header: bytes
    key_id: bytes
    nonce: bytes
    open_part: bytes
    ciphertext: bytes


def _parse(data: bytes) -> _Encrypted:
    """The parts of an encrypted message. ForgedError if it is too short to have them."""
    if len(data) < _START:
        raise ForgedError("it is encrypted, and cut short")
    length = _LENGTH.unpack_from(data, _START - _LENGTH.size)[0]
    header = data[: _START + length]
    ciphertext = data[_START + length :]
    nonce = len(ENCRYPTED_MARK) + ID_BYTES
    return _Encrypted(
        header,
        header[len(ENCRYPTED_MARK) : nonce],
        header[nonce : nonce + NONCE_BYTES],
        header[_START:],
        ciphertext,
    )


def _require_open_part(found: _Encrypted) -> bytes:
    if not found.open_part:
        raise UnknownKeyError("it was encrypted with another key")
    return found.open_part


class _Typed(msgspec.Struct):
    type: str = ""


def _split(payload: bytes) -> tuple[bytes, bytes]:
    """What is open of a message, and what is not; nothing is not if it is not confidential."""
    if payload.startswith(COMPRESSED_MARK):
        return b"", payload
    kind = msgspec.json.decode(payload, type=_Typed).type if payload else ""
    if kind in _WHOLE:
        return b"", payload
    fields = _fields(payload) if kind in _PARTLY else {}
    secret = {name: fields.pop(name) for name in _PARTLY.get(kind, ()) if name in fields}
    if all(bytes(value) == b"null" for value in secret.values()):
        return payload, b""
    return msgspec.json.encode(fields), msgspec.json.encode(secret)


def _merge(open_part: bytes, secret: bytes) -> bytes:
    try:
        return msgspec.json.encode(_fields(open_part) | _fields(secret))
    except msgspec.MsgspecError:
        raise ForgedError("what it encrypts is no part of a message") from None


def _fields(message: bytes) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(message, type=dict[str, msgspec.Raw])
