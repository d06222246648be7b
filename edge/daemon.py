"""The line's daemon: start, serve, drain, close."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from broker_config.errors import EdgeNodeError
from edge import assembly, expiry
from edge.assembly import Site
from edge.http.app import App
from edge.http.server import Server
from edge.line import Frame, Line, Prepared, Source, load
from edge.metrics import Counted, Metrics
from edge.settings import Settings

if TYPE_CHECKING:
    from edge.verify import Guard


def serve(
    bundle_folder: Path,
    settings: Settings,
    site: Site,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    threads: int = 0,
    guard: "Guard | None" = None,
) -> int:
    """Serve a bundle that `guard` admits, until SIGTERM or SIGINT; returns 0.

    It answers over HTTP, and judges what the sources of `settings` bring. `port` 0 takes a free one; `ready URL`
    on standard error says when and where.
    Raises EdgeNodeError when the bundle, the port, a source or a sink cannot be used.
    """
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(_listen(host, port))
        model = load(bundle_folder, guard, threads)
        sources = assembly.sources(settings.sources)
        metrics = Metrics()
        outbox = Counted(metrics, closing.enter_context(assembly.outbox(settings, site)))
        watchers = [*assembly.watchers(settings, outbox, metrics, closing), metrics.saw]
        line = closing.enter_context(contextlib.closing(Line(model, outbox, settings.view, watchers)))
        uvloop.run(_run(line, App(line, metrics), sources, listener))
    return 0


async def _run(line: Line, app: App, sources: Sequence[Source], listener: socket.socket) -> None:
    """Serve until a signal, or until a part of the daemon fails; then drain."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = Server(app, lambda: _announce(listener))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    feeding = [asyncio.create_task(_feed(line, source, stop)) for source in sources]
    reminding = asyncio.create_task(expiry.remind(line.model.ends, stop))
    stopped = asyncio.create_task(stop.wait())

    await asyncio.wait([stopped, serving, *feeding], return_when=asyncio.FIRST_COMPLETED)

    line.draining = server.should_exit = True
    stop.set()
    await serving
    await reminding
    for feed in feeding:
        await feed


async def _feed(line: Line, source: Source, stop: asyncio.Event) -> None:
    """Judge a source's frames in their order; the next one is decoded while one is judged."""
    before: asyncio.Task[None] | None = None
    async for frame in source.frames(stop):
        prepared = await line.prepare(frame)
        if before:
            await before
        before = asyncio.create_task(_conclude(line, source, frame, prepared))
    if before:
        await before


async def _conclude(line: Line, source: Source, frame: Frame, prepared: Prepared) -> None:
    source.done(frame, await line.conclude(prepared))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol named, asyncio turns Nagle's algorithm off; answers would wait 40 ms otherwise.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # now: until then another daemon could bind the port too
    except OSError as error:
        raise EdgeNodeError(
            f"cannot listen on {host}, port {port}: {error.strerror}",
            "stop the program that holds the port, or take another with --port (0: any that is free)",
        ) from error
    return listener


def _announce(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    print(f"ready http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)
