"""Warnings before a served bundle or its charter expires;
a running line never stops because of that.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Literal

ExpiryDates = Mapping[Literal["bundle", "charter"], datetime]
UNCHECKED: ExpiryDates = MappingProxyType({})  # no signature was checked

_EARLY = timedelta(days=30)
_DAY = 24 * 3600.0  # seconds between two warnings
_REMEDIES: Mapping[Literal["bundle", "charter"], str] = {
    "bundle": "let its model be exported again with a kit",
    "charter": "take a newer trust file from whoever provisions the federation",
}
_log = logging.getLogger(__name__)


def expiry_warnings(dates: ExpiryDates, now: datetime) -> dict[Literal["bundle", "charter"], str]:
    """A warning for each date that is within 30 days, or past."""
    return {what: _warning(what, end, now) for what, end in dates.items() if end - now < _EARLY}


def _warning(what: Literal["bundle", "charter"], end: datetime, now: datetime) -> str:
    if end < now:
        return (
            f"the {what} has expired on {end:%Y-%m-%d}: this line will not start again; "
            f"{_REMEDIES[what]}"
        )
    return f"the {what} expires on {end:%Y-%m-%d}; {_REMEDIES[what]}"


def log_warnings(dates: ExpiryDates) -> None:
    """Log the warnings."""
    for text in expiry_warnings(dates, datetime.now(UTC)).values():
        _log.warning(text)


async def log_warnings_daily(dates: Callable[[], ExpiryDates], stop: asyncio.Event) -> None:
    """Log the warnings for what is then served, now and once a day until `stop` is set."""
    while not stop.is_set():
        log_warnings(dates())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _DAY)
