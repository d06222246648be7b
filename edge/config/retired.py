"""Commands and options that earlier versions had: who still uses one is told what to do instead."""

from collections.abc import Sequence

from broker_config.protocol.errors import UsageError

_ONE_COORDINATOR = (
    "let all plants join one coordinator, which serves several hundred: edge-node coordinate, without regions"
)

RETIRED_COMMANDS = {
    "relay": _ONE_COORDINATOR,
}
"""Command -> remedy."""

RETIRED_OPTIONS = {
    "coordinate --region": _ONE_COORDINATOR,
    "provision --bridge": _ONE_COORDINATOR,
}
"""Command and option -> remedy. The option's TOML key and environment variable are retired with it."""


def check_command(command: str) -> None:
    """Raise UsageError if a command is retired."""
    remedy = RETIRED_COMMANDS.get(command)
    if remedy is not None:
        raise UsageError(f"edge-node has no command {command} any more", remedy)


def check_words(command: str, words: Sequence[str]) -> None:
    """Raise UsageError if one of the words behind a command is a retired option of it."""
    for word in words:
        if word == "--":
            return
        check_option(command, word.partition("=")[0])


def check_option(command: str, option: str, shown: str = "") -> None:
    """Raise UsageError if an option, which may have been `shown` as a key or variable, is retired."""
    remedy = RETIRED_OPTIONS.get(f"{command} {option}")
    if remedy is not None:
        raise UsageError(f"edge-node {command} has no option {shown or option} any more", remedy)
