"""Secrets from the environment: variables, or systemd credentials of the same names."""

import os
from pathlib import Path

PASSWORD = "EDGE_NODE_PASSWORD"  # noqa: S105  (its name)
PASSPHRASE = "EDGE_NODE_PASSPHRASE"  # noqa: S105
HTTP_TOKEN = "EDGE_NODE_HTTP_TOKEN"  # noqa: S105
_ALL = (PASSWORD, PASSPHRASE, HTTP_TOKEN)


def read_secret(name: str) -> str | None:
    """A secret by its variable's name; systemd
    (LoadCredential=NAME:FILE) keeps it from other processes' eyes.
    """
    if found := os.environ.get(name):
        return found
    try:
        return (Path(os.environ["CREDENTIALS_DIRECTORY"]) / name).read_text().rstrip("\n") or None
    except (KeyError, FileNotFoundError):
        return None


def environment_without_secrets() -> dict[str, str]:
    """Our environment without our secrets, for child processes that need none of them."""
    return {name: value for name, value in os.environ.items() if name not in _ALL}
