"""What a line serves does not last for ever: it says so in good time, and never stops by itself."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

Ends = Mapping[str, datetime]  # what it is, and when it ends
UNCHECKED: Ends = MappingProxyType({})  # no signature was looked at

_EARLY = timedelta(days=30)
_DAY = 24 * 3600.0  # seconds between two warnings
_REMEDIES = {
    "bundle": "let its model be exported again with a kit",
    "charter": "take a newer trust file from whoever provisions the federation",
}
_log = logging.getLogger(__name__)


def warnings(ends: Ends, now: datetime) -> list[str]:
    """What will end within 30 days, or has ended."""
    return [_warning(what, end, now) for what, end in ends.items() if end - now < _EARLY]


def _warning(what: str, end: datetime, now: datetime) -> str:
    if end < now:
        return f"the {what} has expired on {end:%Y-%m-%d}: this line will not start again; {_REMEDIES[what]}"
    return f"the {what} expires on {end:%Y-%m-%d}; {_REMEDIES[what]}"


def tell(ends: Ends) -> None:
    """Log the warnings."""
    for text in warnings(ends, datetime.now(UTC)):
        _log.warning(text)


async def remind(ends: Callable[[], Ends], stop: asyncio.Event) -> None:
    """Log the warnings of what is served now, and once a day until `stop` is set."""
    while not stop.is_set():
        tell(ends())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _DAY)
