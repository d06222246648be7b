"""Files of a page as routes, with headers that keep a browser to this server and its scripts."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from edge.http.openapi import Answer, Operation
from edge.http.web_app import Route

_FOLDER = Path(__file__).parent
_SHARED = "/page/"  # whence all pages have what they share
_SHARED_FILES = ("base.css", "login.js", "words.js")
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
}
_WHAT = {
    ".html": "A page, for people",
    ".css": "A page's style",
    ".js": "A page's script",
    ".json": "A page's words, by language",
}
_POLICY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes(
    path: str, page: str, files: Sequence[str], folder: Path = _FOLDER
) -> Iterator[Route]:
    """Routes of a page at `path`, which ends with a slash, of the files beside it,
    and of what all pages share.
    """
    yield _route(path, folder / page)
    for name in files:
        yield _route(path + name, folder / name)
    for name in _SHARED_FILES:
        yield _route(_SHARED + name, _FOLDER / name)


def _route(path: str, file: Path) -> Route:
    """Read a file now: the disk may be slow when somebody asks for it."""
    response = Response(file.read_bytes(), media_type=_KINDS[file.suffix], headers=_POLICY)
    kind = _KINDS[file.suffix]
    words = dict[str, dict[str, str]] if file.suffix == ".json" else None
    what = _WHAT[file.suffix]
    about = Operation(what, {200: Answer(what, {kind: words})})
    return Route(path, "GET", partial(_serve, response), about=about)


async def _serve(response: Response, _request: Request) -> Response:
    return response
