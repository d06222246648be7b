"""Secrets that a command is given: environment variables, or credentials of systemd's under the same names."""

import os
from pathlib import Path

PASSWORD = "EDGE_NODE_PASSWORD"  # noqa: S105  (its name)
PASSPHRASE = "EDGE_NODE_PASSPHRASE"  # noqa: S105


def read_secret(name: str) -> str | None:
    """A secret by its variable's name; systemd (LoadCredential=NAME:FILE) keeps it from other processes' eyes."""
    if found := os.environ.get(name):
        return found
    try:
        return (Path(os.environ["CREDENTIALS_DIRECTORY"]) / name).read_text().rstrip("\n") or None
    except (KeyError, FileNotFoundError):
        return None


def environment_without_secrets() -> dict[str, str]:
    """Our environment for processes that we start and that need no secret of ours: what they show, they cannot tell."""
    return {name: value for name, value in os.environ.items() if name not in (PASSWORD, PASSPHRASE)}
