"""The line's daemon: start, serve, drain, close."""

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from broker_config.protocol.errors import EdgeNodeError, explain
from edge.bundle import expiry
from edge.config.line_settings import Settings
from edge.daemon import assembly
from edge.daemon.assembly import Site
from edge.daemon.dispatcher import Receivers
from edge.daemon.logs import Log
from edge.daemon.monitors import Watching
from edge.daemon.prometheus_metrics import Counted, Metrics
from edge.daemon.reload import Parts
from edge.daemon.sd_notify import Manager
from edge.daemon.watchdog import beat, status
from edge.http.app import App
from edge.http.server import Server
from edge.inference import native_memory
from edge.inference.pipeline import Pipeline
from edge.registry.bundle_store import of_line
from edge.registry.rollout import Rollout

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier

_ENDED = 0  # no signal: a part of the daemon has
_PATIENCE = 2.0  # seconds for a command that uses the store

_log = logging.getLogger(__name__)


def serve(
    bundle_folder: Path | None,
    settings: Settings,
    site: Site,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    threads: int = 0,
    verifier: "Verifier | None" = None,
    again: Callable[[], Settings] | None = None,
) -> int:
    """Serve a bundle that `verifier` admits, or without one the store's active one, until SIGTERM or SIGINT; returns 0.

    It answers over HTTP, and judges what the sources of `settings` bring. `port` 0 takes a free one; `ready URL`
    on standard error says when and where. SIGHUP lets `again` read the settings again; without it, it is a SIGTERM.
    Raises EdgeNodeError when the bundle, the port, a source or a sink cannot be used.
    """
    events: asyncio.Queue[int] = asyncio.Queue()
    signal.signal(signal.SIGHUP, lambda number, _: events.put_nowait(number))  # heeded as soon as we are ready
    faulthandler.enable(2)  # a watchdog's SIGABRT shows where each thread was
    native_memory.map_large_blocks()
    with contextlib.ExitStack() as closing:
        log = closing.enter_context(contextlib.closing(Log(settings.log)))
        listener = closing.enter_context(_listen(host, port))
        store = of_line(site.state, site.line)
        closing.enter_context(store.claimed(_PATIENCE))
        rollout = Rollout(store, settings.gate, verifier, threads)
        model = rollout.begin(bundle_folder)
        metrics = Metrics()
        receivers = closing.enter_context(contextlib.closing(Receivers(site, settings.spool)))
        metrics.ask(receivers.readings)
        outbox = Counted(metrics, receivers)
        pipeline = closing.enter_context(
            contextlib.closing(Pipeline(model, outbox, settings.view, [metrics.saw, rollout]))
        )
        closing.enter_context(rollout.of(pipeline))
        if settings.arrival:
            closing.enter_context(assembly.bundle_receiver(settings.arrival, site, rollout, verifier).taking())
        watching = closing.enter_context(contextlib.closing(Watching(pipeline)))
        metrics.ask(watching.readings)
        parts = Parts(pipeline, receivers, watching, site, log)
        uvloop.run(_run(App(pipeline, metrics), pipeline, parts, settings, listener, events, again))
    return 0


async def _run(
    app: App,
    pipeline: Pipeline,
    parts: Parts,
    settings: Settings,
    listener: socket.socket,
    events: asyncio.Queue[int],
    again: Callable[[], Settings] | None,
) -> None:
    """Serve until a signal, or until a part of the daemon ends or fails; then drain."""
    manager, stop = Manager(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, events.put_nowait, number)
    parts.failed = partial(events.put_nowait, _ENDED)
    await parts.become(settings)
    server = Server(app, lambda: _announce(listener, manager, status(pipeline, parts.receivers)))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: events.put_nowait(_ENDED))
    beating = asyncio.create_task(beat(pipeline, parts.receivers, manager, stop))
    reminding = asyncio.create_task(expiry.log_warnings_daily(lambda: pipeline.model.expiry_dates, stop))

    while await events.get() == signal.SIGHUP and again:
        await _reload(parts, manager, again)

    manager.tell(STOPPING=1)
    pipeline.draining = server.should_exit = True
    stop.set()
    await serving
    await parts.end()
    await asyncio.gather(beating, reminding)


async def _reload(parts: Parts, manager: Manager, again: Callable[[], Settings]) -> None:
    """Become what the settings say now, if they can be used."""
    manager.reloading()
    try:
        await parts.become(again())
    except Exception as error:  # whatever it is, the line goes on
        _log.error("the settings stay as they were: %s", explain(error))
    else:
        _log.info("the settings were read again")
    manager.tell(READY=1)


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


def _announce(listener: socket.socket, manager: Manager, state: str) -> None:
    manager.tell(READY=1, STATUS=state)
    host, port = listener.getsockname()[:2]
    sys.stderr.write(f"ready http://{f'[{host}]' if ':' in host else host}:{port}\n")  # at once: sinks log meanwhile
    sys.stderr.flush()
