"""Trust file of a line: the node whose bundles it serves, and the authority it trusts.

Holds no secret.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.protocol.messages import Name
from broker_config.security.received_file import read_json
from broker_config.security.signing import PublicKey


class Trust(Struct, frozen=True, kw_only=True):
    """Which node's bundles a line serves, and the members of its federation."""

    federation: Name
    node: Name
    authority: PublicKey  # who must have signed the member list
    charter: bytes  # the signed member list


def encode(trust: Trust) -> bytes:
    """A trust file's content."""
    return msgspec.json.format(msgspec.json.encode(trust)) + b"\n"


def read(path: Path) -> Trust:
    """Read a trust file; UsageError if it is none. `member_list.verify` checks the list in it."""
    again = "copy it again from the trust/ folder of whoever provisions the federation"
    return read_json(path, Trust, "trust file", again)
