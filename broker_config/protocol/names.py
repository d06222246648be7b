"""Names that come from outside, whoever wrote them: what a class may be called,
and how the name of a file or folder is shown.

A class's name is the name of a folder of images at each plant. It stands in messages, bundles, on
pages and in terminals, so it must neither lead out of its folder nor move a cursor. Anything else
may be a name: spaces and the letters of all languages.
"""

import os
import re

from broker_config.protocol.errors import UsageError, replace_unprintable

LONGEST_CLASS = 200  # characters
# No slashes; no control characters, line breaks or marks that turn the direction of text; no dot at
# the start, where the name of a hidden folder, "." or ".." begins.
CLASS_NAME = (
    r"^(?!\.)[^/\\\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
    r"+\Z"
)
_is_class_name = re.compile(CLASS_NAME).search


def is_class_name(name: str) -> bool:
    """Whether a class may be called so."""
    return len(name) <= LONGEST_CLASS and _is_class_name(name) is not None


def check_class_name(name: str) -> str:
    """Return `name` if a class may be called so, else raise UsageError."""
    if not is_class_name(name):
        raise UsageError(
            f"a class cannot be called {show_name(name)[:LONGEST_CLASS]!r}",
            f"take 1 to {LONGEST_CLASS} characters without slashes, line breaks and control "
            "characters, and no dot at the start",
        )
    return name


def show_name(name: str | os.PathLike[str]) -> str:
    """Return a file's or folder's name in one line of UTF-8, whatever bytes it has on the disk."""
    return replace_unprintable(os.fspath(name), keep="")
