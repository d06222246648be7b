"""`python -m research`, in the process of a test."""

import subprocess

from research.__main__ import app
from tests.support.plants import here


def research(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return here(*words, app=app)
