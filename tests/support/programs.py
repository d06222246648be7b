"""What some tests need beyond Python, mosquitto, openssl and git: whether it is here,
and what brings it.
"""

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

# `make test` unpacks programs into this folder where it may not install them.
UNPACKED = Path(sys.prefix) / "programs" / "bin"

# GenICam's packages load it. Debian's Python does without.
LIBPYTHON = f"libpython{sys.version_info.major}.{sys.version_info.minor}"


class Need(NamedTuple):
    """Something that a test marked `needs(name)` cannot do without."""

    here: bool
    remedy: str


def find_chromium() -> str | None:
    """Return the path of chromium, or of a browser like it; None if there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def find_needs() -> dict[str, Need]:
    """Look for everything that a test can need."""
    return {
        "chromium": Need(find_chromium() is not None, "make pages"),
        "a C compiler": Need(shutil.which("cc") is not None, "make slow as root"),
        "systemd-analyze": Need(shutil.which("systemd-analyze") is not None, "make slow as root"),
        LIBPYTHON: Need(_can_load(f"{LIBPYTHON}.so.1.0"), f"apt install {LIBPYTHON}"),
        "root": Need(os.geteuid() == 0, "the same command as root"),
    }
