"""Trust file of a line: the node whose bundles it serves, and the authority it trusts. Holds no secret."""

from pathlib import Path

import msgspec
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Name
from broker_config.security import member_list

_LARGEST = 1 << 24  # bytes


class Trust(Struct, frozen=True, kw_only=True):
    """Which node's bundles a line serves, and the members of its federation."""

    federation: Name
    node: Name
    authority: member_list.PublicKey  # who must have signed the member list
    charter: bytes  # the signed member list


def encode(trust: Trust) -> bytes:
    """A trust file's content."""
    return msgspec.json.format(msgspec.json.encode(trust)) + b"\n"


def read(path: Path) -> Trust:
    """Read a trust file; UsageError if it is none. `member_list.verify` checks the list in it."""
    again = "copy it again from the trust/ folder of whoever provisions the federation"
    try:
        if path.stat().st_size > _LARGEST:
            raise UsageError(f"{path} is too large for a trust file", again)
        return msgspec.json.decode(path.read_bytes(), type=Trust)
    except OSError as error:
        raise UsageError(
            f"the trust file {path} cannot be read: {error.strerror}",
            "check its name; whoever provisions the federation has it in the folder trust/",
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no trust file ({error})", again) from None
