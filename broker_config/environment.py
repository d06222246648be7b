"""The environment variables that hold secrets, and an environment without them."""

import os

PASSWORD = "EDGE_NODE_PASSWORD"  # noqa: S105  (its name)
PASSPHRASE = "EDGE_NODE_PASSPHRASE"  # noqa: S105


def without_secrets() -> dict[str, str]:
    """Our environment for processes that we start and that need no secret of ours: what they show, they cannot tell."""
    return {name: value for name, value in os.environ.items() if name not in (PASSWORD, PASSPHRASE)}
