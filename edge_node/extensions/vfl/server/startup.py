"""Start of a head from its state folder: a new run, a resumed one, or one that has ended."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from broker_config.mqtt.endpoint import Endpoint
from broker_config.storage import disk
from broker_config.storage.database import check_not_lost
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.networks import embedding_size
from edge_node.extensions.vfl.process_setup import set_up_process
from edge_node.extensions.vfl.server.head import Head
from edge_node.extensions.vfl.server.head_model import Deploy
from edge_node.extensions.vfl.server.head_state import TIMING, Timing
from edge_node.extensions.vfl.server.journal import Journal, resume_or_begin
from edge_node.extensions.vfl.server.labels import Labels
from trainer import progress
from trainer.console.console_process import console_beside
from trainer.federation.presence import await_broker, check_no_server
from trainer.progress import event_log


def coordinate(
    spec: VflSpec,
    labels: Path,
    endpoint: Endpoint,
    folder: Path,
    *,
    rounds: int,
    new: bool,
    report: progress.Report,
    http: str | None = None,
    stop: Callable[[], bool] = lambda: False,
    deploy: Deploy = lambda *_, **__: None,
    timing: Timing = TIMING,
) -> int:
    """Run the head until so many rounds are closed (0: for ever), or `stop` says so;
    return how many are.

    `http` is where a console is served, if one is wanted: [HOST:]PORT.

    Raises:
        BrokerError: the broker cannot be reached.
        UsageError: the federation has a head already, or the run in `folder` has other settings.
        EdgeNodeError: the disk fails. Started again with the same folder, the run goes on.
    """
    set_up_process(spec.threads)
    embedding_size(spec.network, (1, spec.cycles))
    known = Labels(labels, spec.classes)
    known.refresh()
    if not await_broker(lambda: check_no_server(endpoint, spec.federation), report, stop):
        return 0
    with disk.lock_folder(folder), contextlib.closing(Journal(folder)) as journal:
        if journal.newest() is None and not new:
            check_not_lost(folder / Journal.FILE, folder, folder.glob("*/*.safetensors"))
        spec = resume_or_begin(journal, spec, new=new)
        if 0 < rounds <= (played := journal.ended(spec.run)):
            more = "--rounds for more, or --new for another run"
            report(progress.Note(text=f"all {played} rounds are played: {more}"))
            return played
        with console_beside(folder, http, report), event_log.logging(folder, report) as logged:
            head = Head(spec, known, endpoint, folder, journal, rounds, logged, deploy, timing)
            try:
                reached = head.run(stop)
                if head.is_over:
                    journal.end(spec.run, reached)
                return reached
            finally:
                head.close()
