"""A relay: the coordinator of a region's nodes that is one node of the federation above. Without torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.storage import disk
from trainer import progress
from trainer.federation.client.discovery import EndedError, discover
from trainer.federation.client.session import NewRunError, run_session
from trainer.federation.presence import check_name_free
from trainer.federation.region.region_worker import Region, RegionWorker
from trainer.federation.server.coordinator import LINGER, abort
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Participation, draft_region


class RegionRequest(NamedTuple):
    """The region that a relay coordinates."""

    federation: str  # its name
    nodes: int  # places
    participation: Participation = Participation()
    regions: Mapping[str, int] = {}  # relays among its nodes, and how many nodes each may stand for
    linger: float = LINGER  # seconds, as in `coordinate`


def relay(
    above: Endpoint,
    below: Endpoint,
    request: RegionRequest,
    *,
    name: str,
    state: Path,
    federation: str | None,
    wait: float,
    report: progress.Report,
    stop: Callable[[], bool] = lambda: False,
) -> Path | None:
    """Take part in a federation for a region, to its end; None when `stop` said to suspend that before.

    Returns the file of the federation's result.

    Args:
        above: the broker of the federation above.
        below: that of the region; it may be the same.
        request: the region.
        name: of this relay in the federation above.
        state: folder for its state.
        federation: name of the federation above; None takes the only one on its broker.
        wait: seconds to wait for its coordinator.
        report: shows progress.
        stop: asked often.

    Raises:
        EdgeNodeError: with what to do about it.
    """

    def notify(text: str) -> None:
        report(progress.Note(text=text))

    def report_above(event: progress.AnyEvent) -> None:
        if isinstance(event, progress.Note):  # rounds are shown as the region's
            notify(f"above: {event.text}")

    topics.check_node(name)
    disk.check_writable(state)
    session, ledger = state / "node", state / "region"
    report(progress.Step(what=f"looking for a federation on {above}"))
    try:
        federated = discover(above, federation, wait, notify, stop, session)
        if federated is None:
            return None
        spec = draft_region(
            federated.spec,
            name,
            federation=request.federation,
            nodes=request.nodes,
            participation=request.participation,
            regions=request.regions,
        )
        region = Region(spec, below, ledger, request.linger)
        notify(
            f"federation {federated.spec.federation!r} ({spec.method}, {spec.model}): as {name}, for the "
            f"{request.nodes} nodes of region {spec.federation!r} on {below}"
        )
        check_name_free(above, federated.spec.federation, name, session)
        return run_session(
            federated.spec,
            name,
            above,
            session,
            lambda inbox: RegionWorker(federated.spec, name, region, session, inbox, report),
            telemetry=False,
            report=report_above,
            stop=stop,
        )
    except EndedError as error:
        _abort_region(ledger, below, error.what)
        raise
    except NewRunError as error:
        notify(f"{error.what}: joining that")
    return relay(
        above,
        below,
        request,
        name=name,
        state=state,
        federation=federation,
        wait=wait,
        report=report,
        stop=stop,
    )


def _abort_region(folder: Path, endpoint: Endpoint, reason: str) -> None:
    """Let the region's nodes know that its run has ended early, if one was open."""
    if not folder.exists():
        return
    with Ledger(folder) as ledger:
        if ledger.run is not None and ledger.run.outcome is None:
            abort(ledger, endpoint, reason)
