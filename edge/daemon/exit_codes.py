"""Exit codes of `serve`, after sysexits.h: they tell a service manager which failures a restart
cures.
"""

import contextlib
import errno
import os
from collections.abc import Iterator

from broker_config.protocol.errors import BrokerError, BugError, UsageError, explain
from edge.bundle.bundle_format import BundleError

_BY_CAUSE = {
    errno.ENOENT: os.EX_NOINPUT,
    errno.ENOTDIR: os.EX_NOINPUT,
    errno.EACCES: os.EX_NOPERM,
    errno.EPERM: os.EX_NOPERM,
    errno.EROFS: os.EX_NOPERM,
    errno.ENOSPC: os.EX_IOERR,
    errno.EDQUOT: os.EX_IOERR,
    errno.EFBIG: os.EX_IOERR,
    errno.EIO: os.EX_IOERR,
}
# a restart cures none of these
FINAL = (2, os.EX_DATAERR, os.EX_NOINPUT, os.EX_NOPERM, os.EX_CONFIG)


@contextlib.contextmanager
def sysexits() -> Iterator[None]:
    """Raise every error as an EdgeNodeError whose exit code is that of sysexits.h."""
    try:
        yield
    except Exception as error:
        explained = explain(error)
        explained.exit_code = code(error)
        raise explained from error


def code(error: Exception) -> int:
    """The exit code of an error, by what caused it."""
    explained = explain(error)
    if isinstance(explained, BrokerError | BugError):
        return explained.exit_code
    cause: BaseException | None = error
    while cause and not (isinstance(cause, OSError) and cause.errno in _BY_CAUSE):
        cause = cause.__cause__
    if isinstance(cause, OSError):
        return _BY_CAUSE[cause.errno or 0]
    if isinstance(error, BundleError):
        return os.EX_DATAERR
    return os.EX_CONFIG if isinstance(error, UsageError) else os.EX_TEMPFAIL
