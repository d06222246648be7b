"""Hook of the documentation's site: links to what is in the repository, but not on the site, become plain text."""

import re
from typing import Any

_OUTSIDE = re.compile(r"!?\[([^\]]+)\]\(\.\./(?!docs/)([^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name the file instead, unless the text does."""
    return _OUTSIDE.sub(lambda link: link[1] if link[2] in link[1] else f"{link[1]} (`{link[2]}`)", markdown)
