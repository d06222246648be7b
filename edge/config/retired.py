"""Options and commands that former versions had, and what to do without each;
whoever gives one is told.
"""

from collections.abc import Sequence

from broker_config.protocol.errors import UsageError

_EVERY_FIFTH_ROUND = "leave it out: models are judged after every fifth round, and the last"
_ONE_ADMINISTRATOR = (
    "leave it out: a federation has one administrator, whose folder stays with a backup"
)

# Name -> remedy. An option that other commands still have stands behind its command: "simulate
# --evaluate-every".
RETIRED_OPTIONS = {
    "provision --as": _ONE_ADMINISTRATOR,
    "provision --administrator": _ONE_ADMINISTRATOR,
    "provision --register": _ONE_ADMINISTRATOR,
    "--student": (
        "leave it out: an encoder that changes no verdict is left out without it, and --int8 "
        "is faster"
    ),
    "coordinate --region": "let all plants join this coordinator: one serves several hundred",
    "provision --bridge": (
        "let all plants join one coordinator, by one broker: they serve several hundred"
    ),
    "coordinate --chunk-size": (
        "leave it out: let the broker pass messages of 262,144 bytes and 1,024 more"
    ),
    "coordinate --evaluate-every": _EVERY_FIFTH_ROUND,
    "coordinate --min-wait": (
        "leave it out: a round closes once its --quorum is in and nobody who is there is missing"
    ),
    "coordinate --start": "leave it out: so many nodes as --quorum says open the first round",
    "coordinate --staleness": (
        "leave it out: --quorum closes a round without a slow plant, which gains as much"
    ),
    "simulate --evaluate-every": _EVERY_FIFTH_ROUND,
}
RETIRED_COMMANDS = {
    "explain": "read what to do below the message, and docs/troubleshooting.md",
    "init": (
        "write KEY = VALUE lines into a TOML file for --config; edge-node serve --help names "
        "one to copy"
    ),
    "relay": (
        "let all plants join one coordinator (edge-node coordinate): one serves several hundred"
    ),
}


def find_remedy(command: str, option: str) -> str | None:
    """Return what to do without a retired option, None if the option is not one."""
    return RETIRED_OPTIONS.get(f"{command} {option}") or RETIRED_OPTIONS.get(option)


def refuse_retired(words: Sequence[str]) -> None:
    """Raise UsageError if the words behind `edge-node` name a retired command,
    or give it a retired option.
    """
    for name, remedy in RETIRED_COMMANDS.items():
        if _begins(words, name.split()):
            raise UsageError(f"there is no command edge-node {name} any more", remedy)

    given = {word.partition("=")[0] for word in words}
    for name, remedy in RETIRED_OPTIONS.items():
        *command, option = name.split()
        if option in given and _begins(words, command):
            raise UsageError(f"edge-node {words[0]} has no option {option} any more", remedy)


def _begins(words: Sequence[str], beginning: Sequence[str]) -> bool:
    return list(words[: len(beginning)]) == list(beginning)
