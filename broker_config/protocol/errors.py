"""Errors with a remedy, ours or a peer's, and text that is safe to show."""

import difflib
import errno
import os
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FILES = re.compile(r"system error number 2[34]\b")  # onnxruntime's words for ENFILE and EMFILE
_NO_MORE = re.compile(
    "can't start new thread|pthread_create failed|bad_alloc|[Ff]ailed to allocate memory"
    "|can't allocate memory|failed to map segment"  # torch's words, and the loader's
)
_TRAIN = (  # what the line's install lacks
    "amqtt",
    "edge_node_weights",
    "jinja2",
    "markupsafe",
    "onnx",
    "onnxscript",
    "psutil",
    "scipy",
    "sklearn",
    "threadpoolctl",
    "torch",
    "torchvision",
)


class EdgeNodeError(Exception):
    """Our side cannot go on: `what` happened, and the `remedy` that the user can apply."""

    exit_code = 1

    def __init__(self, what: str, remedy: str = ""):
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  What to do: {self.remedy}" if self.remedy else self.what


class UsageError(EdgeNodeError):
    """What the user asked for cannot be done as asked (options, names, folders)."""

    exit_code = 2


class BrokerError(EdgeNodeError):
    """The broker cannot be reached or does not let us in."""

    exit_code = 69  # EX_UNAVAILABLE


class BrokerFullError(BrokerError):
    """The broker has no room for another connection now."""


class BrokerAwayError(BrokerError):
    """Nothing answers at the broker's address: it may not have started yet."""


class PeerError(Exception):
    """A peer broke the protocol: it is named, logged and left out; the round goes on without it.

    Its operator is told the remedy, by default the usual one.
    """

    def __init__(self, peer: str, why: str, round_: int | None = None, remedy: str = ""):
        why = abbreviate(why)
        round_text = "" if round_ is None else f" in round {round_}"
        super().__init__(f"{peer}{round_text}: {why}")
        self.peer = peer
        self.why = why
        self.round = round_
        self.remedy = remedy


class BugError(EdgeNodeError):
    """Something that must not happen."""

    exit_code = 70  # EX_SOFTWARE


def abbreviate(text: str, most: int = 300) -> str:
    """Make a text of a peer, or about one, fit for a log, a terminal and a Refusal.

    No control characters; at most about `most` characters, without the middle of a longer text.
    """
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return replace_unprintable(text, keep="")


def replace_unprintable(text: str, keep: str = "\n") -> str:
    """Make a text that others may have written safe for a terminal: it cannot move the cursor."""
    isprintables = []
    for each in text:
        isprintable = each if each.isprintable() or each in keep else "\N{REPLACEMENT CHARACTER}"
        isprintables.append(isprintable)
    return "".join(isprintables)


def explain(error: Exception) -> EdgeNodeError:
    """Turn any error into one for the user; an unexpected one is a bug of ours."""
    if isinstance(error, EdgeNodeError):
        return error
    if scarce := explain_scarcity(error):
        return scarce
    match error:
        case OSError(errno=number, filename=name, strerror=reason) if number in _FULL:
            name_text = f" {name}" if name else ""
            return EdgeNodeError(
                f"cannot write{name_text}: {reason}",
                "free some space on this disk",
            )
        case OSError(errno=number, filename=str(name), strerror=reason) if number in _FORBIDDEN:
            return EdgeNodeError(
                f"{name} may not be used: {reason}",
                "make it accessible for this user, or name another",
            )
        case FileNotFoundError(filename=str(name), strerror=reason):
            return EdgeNodeError(
                f"{name} is missing: {reason}",
                "name one that exists; if it was removed while edge-node ran, restore its folder "
                "from a copy",
            )
        case ModuleNotFoundError(name=name) if name in _TRAIN:
            return EdgeNodeError(
                f"this needs {name}, which is not installed here",
                "install the trainer: pip install 'edge-node[train]'",
            )
        case ModuleNotFoundError(
            name="matplotlib" | "ray" | "gymnasium" | "stable_baselines3" as name
        ):
            return EdgeNodeError(
                f"this needs {name}, which is not installed here",
                "in a checkout, install what research needs: pip install --editable "
                "'.[train,research]' ./weights",
            )
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return BugError(
        f"this is a bug in edge-node: {what} ({Path(place.filename).name}, line {place.lineno})",
        "run it again as edge-node --debug COMMAND ..., and report the traceback to whoever gave "
        "you edge-node",
    )


def explain_scarcity(error: BaseException | None) -> EdgeNodeError | None:
    """The error for the user if this one, or one that led to it,
    says that the system grants us no more.
    """
    while error:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.EMFILE, errno.ENFILE) or _NO_FILES.search(str(error)):
            return EdgeNodeError(
                f"too many files and connections are open: {os.strerror(number or errno.EMFILE)}",
                "raise the limit (ulimit -n 4096; LimitNOFILE= in a service), or end what holds "
                "so many open",
            )
        if (
            number in (errno.ENOMEM, errno.EAGAIN)
            or isinstance(error, MemoryError)
            or _NO_MORE.search(str(error))
        ):
            return EdgeNodeError(
                "memory or processes do not suffice: "
                f"{abbreviate(str(error)) or type(error).__name__}",
                "end what takes so much, or raise limits (ulimit -v, ulimit -u; MemoryMax=, "
                "TasksMax= in a service)",
            )
        error = error.__cause__ or error.__context__
    return None


def suggest(wrong: str, known: Iterable[str]) -> str:
    """A remedy that names the known words that start with a wrong one, else the nearest,
    else all of them.
    """
    known = list(known)
    begun = [each for each in known if each.startswith(wrong)]
    close = begun or difflib.get_close_matches(wrong, known, n=1)
    return (
        f"did you mean {close[0]!r}?"
        if len(close) == 1
        else f"take one of {', '.join(close or known) or '(none)'}"
    )
