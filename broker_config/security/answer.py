"""The authority's answer to a member's request: what its kit holds beside the private keys.

Holds no secret.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Name
from broker_config.security import certificate_authority
from broker_config.security.received_file import read_json
from broker_config.security.signing import ForgedError, PublicKey, SigningKey, open_envelope

_FORMAT = 1
_CONTEXT = "answer"
_AGAIN = "have it sent again by whoever provisions the federation: answers/NAME.answer"


class Answer(Struct, frozen=True, kw_only=True):
    """What the authority tells a member."""

    federation: Name
    name: Name  # of the member: a node's, `coordinator` or `monitor`
    broker: str  # its URL
    authority: PublicKey  # who must have signed the member list
    charter: bytes  # the signed member list
    ca: str  # PEM: who signs the certificates of this federation's broker
    certificate: str  # PEM


class _SignedAnswer(Struct, frozen=True, kw_only=True):
    """An answer on its way; `authority` is believed once its fingerprint was compared."""

    edge_node_answer: int
    authority: PublicKey
    signed: bytes


def encode(answer: Answer, key: SigningKey) -> bytes:
    """Return an answer file's content, signed by the authority."""
    signed = key.sign_envelope(_CONTEXT, msgspec.json.encode(answer))
    file = _SignedAnswer(edge_node_answer=_FORMAT, authority=answer.authority, signed=signed)
    return msgspec.json.format(msgspec.json.encode(file)) + b"\n"


def read(path: Path) -> Answer:
    """Read an answer that its own authority has signed, and whose certificate is of its own CA.

    Whether that is the right authority, and the answer is ours, is for the caller to find out.

    Raises:
        UsageError: it is no answer, or was damaged.
    """
    file = read_json(path, _SignedAnswer, "answer", _AGAIN)
    if file.edge_node_answer != _FORMAT:
        raise UsageError(
            f"{path} is an answer of another version of edge-node", "upgrade edge-node here"
        )
    try:
        found = msgspec.json.decode(
            open_envelope(file.authority, _CONTEXT, file.signed), type=Answer
        )
        if found.authority != file.authority:
            raise ForgedError("it is of another authority than it says")
        certificate_authority.check_issued(
            found.certificate, found.ca, found.federation, found.name
        )
    except (msgspec.MsgspecError, ValueError) as error:  # ForgedError is a ValueError
        raise UsageError(f"the answer {path} cannot be relied on: {error}", _AGAIN) from None
    return found
