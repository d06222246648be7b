"""Hooks of the documentation's site: links that lead out of it become text,
diagrams need no other host.
"""

import re
from importlib.resources import files as resources
from typing import Any

from mkdocs.structure.files import File, Files

_OUTSIDE = re.compile(r"!?\[([^\]]+)\]\(\.\./(?!docs/)([^)#\s]+)[^)]*\)")
_MERMAID = "assets/javascripts/mermaid.min.js"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name the file instead, unless the text does."""
    return _OUTSIDE.sub(
        lambda link: link[1] if link[2] in link[1] else f"{link[1]} (`{link[2]}`)", markdown
    )


def on_files(files: Files, config: Any) -> Files:
    """Bring mermaid along: the theme would load it from another host."""
    script = resources("diagram_renderer") / "renderers" / "static" / "js" / "mermaid.min.js"
    files.append(File.generated(config, _MERMAID, content=script.read_bytes()))
    return files


def on_post_page(output: str, **_: Any) -> str:
    """Load it before the theme's own script, on pages that have a diagram."""
    tag = f'<script src="{_MERMAID}"></script>' if '<pre class="mermaid">' in output else ""
    return output.replace("</head>", f"{tag}</head>", 1)
