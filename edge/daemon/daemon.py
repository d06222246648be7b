"""The line's daemon: start, serve, drain, close."""

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from broker_config.protocol.errors import explain, replace_unprintable
from broker_config.security.secret_environment import HTTP_TOKEN, read_secret
from broker_config.storage import disk
from edge.bundle import expiry
from edge.config.instance import Instance
from edge.daemon import line_parts
from edge.daemon.dispatcher import Dispatcher
from edge.daemon.line_settings import Settings
from edge.daemon.logs import Log
from edge.daemon.monitors import Monitors
from edge.daemon.reload import Reloader
from edge.daemon.sd_notify import ServiceManager, run_watchdog, status
from edge.http.access import Access
from edge.http.app import App
from edge.http.login import Accounts, Logins
from edge.http.prometheus_metrics import CountingConsumer, Metrics
from edge.http.server import Server, listen
from edge.inference import native_memory
from edge.inference.pipeline import Pipeline
from edge.labelling import label_queue
from edge.labelling.label_queue import DamagedHistoryError, LabelQueue
from edge.page.label_page import LabelPage
from edge.page.line_page import LinePage
from edge.page.recent_inspections import RecentInspections
from edge.registry.bundle_store import line_store
from edge.registry.rollout import Rollout
from edge.uncertainty import image_retention
from edge.uncertainty.model_warnings import log_model_warnings
from edge.uncertainty.performance import held_out_performance

if TYPE_CHECKING:
    from edge.bundle.verification import Verifier

_ENDED = 0  # no signal: a part of the daemon has ended
# seconds after a signal, when whatever still runs is ended; systemd would wait for 60
_LAST_RESORT = 40.0
_STORE_TIMEOUT = 2.0  # seconds to wait for a command that uses the store

_log = logging.getLogger(__name__)


def serve(
    bundle_folder: Path | None,
    settings: Settings,
    instance: Instance,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    allow_hosts: Sequence[str] = (),
    threads: int = 0,
    verifier: "Verifier | None" = None,
    read_settings: Callable[[], Settings] | None = None,
) -> int:
    """Serve a bundle that `verifier` admits, or without one the store's active one,
    until SIGTERM or SIGINT; returns 0.

    It answers over HTTP, and inspects the images of the sources in `settings`. `port` 0 takes a
    free one; a line `ready URL` on standard error says when and where. SIGHUP has `read_settings`
    read the settings again; without it, SIGHUP is a SIGTERM. It answers to its addresses, this
    machine's name and `allow_hosts`.

    Raises EdgeNodeError when the bundle, the port, a source or a sink cannot be used.
    """
    events: asyncio.Queue[int] = asyncio.Queue()
    # handled as soon as we are ready
    signal.signal(signal.SIGHUP, lambda number, _: events.put_nowait(number))
    faulthandler.enable(2)  # a watchdog's SIGABRT shows where each thread was
    native_memory.map_large_blocks()
    with contextlib.ExitStack() as closing:
        log = closing.enter_context(contextlib.closing(Log(settings.log)))
        listener = closing.enter_context(listen(host, port))
        access = Access.of(host, allow_hosts, read_secret(HTTP_TOKEN) or "")
        _warn_if_open(listener, access)
        disk.check_writable(instance.state)
        store = line_store(instance.state, instance.line)
        closing.enter_context(store.lock(_STORE_TIMEOUT))
        rollout = Rollout(store, settings.gate, verifier, threads)
        model = rollout.load_first(bundle_folder)
        metrics = Metrics()
        dispatcher = closing.enter_context(contextlib.closing(Dispatcher(instance, settings.spool)))
        metrics.register(dispatcher.readings)
        recent = RecentInspections(CountingConsumer(metrics, dispatcher))
        pipeline = Pipeline(
            model, recent, settings.view, [metrics.observe, rollout, recent.observe], settings.prior
        )
        closing.enter_context(contextlib.closing(pipeline))
        closing.enter_context(rollout.manage(pipeline))
        line = line_parts.ServedLine(instance, rollout, verifier)
        for added in settings.added.values():
            closing.enter_context(added.open_part(line))
        monitors = closing.enter_context(contextlib.closing(Monitors(pipeline)))
        metrics.register(monitors.readings)
        reloader = Reloader(pipeline, dispatcher, monitors, instance, log)
        labels = None
        if settings.labels:
            closing.enter_context(_lock_labels(settings.labels, settings.keep, instance.line))
        queue = _open_labels(settings, instance.line, monitors)
        if queue:
            labels = closing.enter_context(
                contextlib.closing(LabelPage(instance.line, pipeline, recent, queue))
            )
            metrics.register(labels.readings)
        page = LinePage(
            instance.line,
            pipeline,
            recent,
            lambda: monitors.drift,
            labels,
            dispatcher.away,
            labels_damaged=settings.labels is not None and labels is None,
        )
        metrics.register(page.readings)
        label_routes = labels.routes if labels else ()
        pages = [*page.routes, *label_routes]
        app = App(pipeline, metrics, access, pages, Logins(Accounts(instance.state)))
        uvloop.run(_run(app, pipeline, reloader, settings, listener, events, read_settings))
    faulthandler.cancel_dump_traceback_later()
    return 0


async def _run(
    app: App,
    pipeline: Pipeline,
    reloader: Reloader,
    settings: Settings,
    listener: socket.socket,
    events: asyncio.Queue[int],
    read_settings: Callable[[], Settings] | None,
) -> None:
    """Serve until a signal, or until a part of the daemon ends or fails; then drain."""
    manager = ServiceManager()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, events.put_nowait, number)
    reloader.on_failure = partial(events.put_nowait, _ENDED)
    await reloader.apply(settings)
    _describe_model(pipeline)
    server = Server(
        app, lambda: _announce(listener, manager, status(pipeline, reloader.dispatcher))
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: events.put_nowait(_ENDED))
    watchdog = asyncio.create_task(run_watchdog(pipeline, reloader.dispatcher, manager, stop))
    reminding = asyncio.create_task(
        expiry.log_warnings_daily(lambda: pipeline.model.expiry_dates, stop)
    )

    while await events.get() == signal.SIGHUP and read_settings:
        await _reload(reloader, manager, read_settings)

    # a thread that hangs must not keep the process
    faulthandler.dump_traceback_later(_LAST_RESORT, exit=True)
    manager.notify(STOPPING=1)
    pipeline.draining = server.should_exit = True
    stop.set()
    await serving
    await reloader.stop_sources()
    await asyncio.gather(watchdog, reminding)


async def _reload(
    reloader: Reloader, manager: ServiceManager, read_settings: Callable[[], Settings]
) -> None:
    """Apply the settings as they are now, if they can be used."""
    manager.notify_reloading()
    try:
        await reloader.apply(read_settings())
    except Exception as error:  # whatever it is, the line goes on
        _log.error("the settings stay as they were: %s", explain(error))
    else:
        _log.info("the settings were read again")
    manager.notify(READY=1)


@contextlib.contextmanager
def _lock_labels(
    settings: label_queue.Settings, keep: image_retention.Settings | None, line: str
) -> Iterator[None]:
    """Keep other lines from writing this line's labels, and from labelling the images that it
    keeps: one could get into two classes.
    """
    images = Path(settings.path)
    with disk.writing(images):
        images.mkdir(parents=True, exist_ok=True)
    remedy = "stop that line, or give this one a name of its own: --line NAME"
    with contextlib.ExitStack() as locks:
        history = images / label_queue.history_name(line)
        lock = history.with_name(f"{history.name}.lock")
        locks.enter_context(disk.lock_file(lock, f"the history of labels {history}", remedy))
        if keep:
            kept = Path(keep.path)
            with disk.writing(kept):
                kept.mkdir(parents=True, exist_ok=True)
            remedy = "stop that line, or give this one another folder in its table [keep]"
            locks.enter_context(disk.lock_file(kept / "lock", f"the folder {kept}", remedy))
        yield


def _open_labels(settings: Settings, line: str, monitors: Monitors) -> LabelQueue | None:
    """The queue of images that wait for a label, if the line has one.

    A damaged history costs the labels, not the line.
    """
    if not settings.labels:
        return None
    try:
        return LabelQueue(settings.labels, line, lambda: monitors.retention)
    except DamagedHistoryError as error:
        _log.error("the line serves without labels: %s", error)
        return None


def _warn_if_open(listener: socket.socket, access: Access) -> None:
    host, port = listener.getsockname()[:2]
    if not (access.token or ip_address(host).is_loopback):
        _log.warning(
            "whoever reaches port %s of %s can have images judged, and verdicts sent to all "
            "sinks: set %s",
            port,
            host,
            HTTP_TOKEN,
        )


def _describe_model(pipeline: Pipeline) -> None:
    """Say what joining was worth, what the bundle's held-out images tell of the model under
    view and prior, and what there is to warn of.
    """
    manifest = pipeline.model.manifest
    if manifest.comparison:
        _say(f"{manifest.id}: {manifest.comparison.describe()}")
    if found := held_out_performance(manifest, pipeline.view, pipeline.prior):
        _say(f"{manifest.id}: {found}")
    log_model_warnings(manifest, pipeline.view, pipeline.prior)


def _say(text: str) -> None:
    """Say it whatever the log's level, which begins with warnings;
    names in it come from a bundle.
    """
    sys.stderr.write(replace_unprintable(text, keep="") + "\n")


def _announce(listener: socket.socket, manager: ServiceManager, state: str) -> None:
    manager.notify(READY=1, STATUS=state)
    host, port = listener.getsockname()[:2]
    # at once: sinks log meanwhile
    host_text = f"[{host}]" if ":" in host else host
    sys.stderr.write(f"ready http://{host_text}:{port}\n")
    sys.stderr.flush()
