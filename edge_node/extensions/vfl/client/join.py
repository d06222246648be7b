"""A sensor's joining of a vertical federation: discovery, then its session.

Itself without torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol import topics
from broker_config.protocol.errors import UsageError
from broker_config.storage import disk
from edge_node.extensions.vfl.line.sensor_rows import RowFile
from trainer import progress
from trainer.federation.presence import check_name_free

if TYPE_CHECKING:
    from edge_node.extensions.vfl.client.sensor_trainer import Deploy


from edge_node.extensions.vfl.client.discovery import find_spec


def join(
    endpoint: Endpoint,
    name: str,
    rows: RowFile,
    state: Path,
    *,
    federation: str | None,
    wait: float,
    report: progress.Report,
    stop: Callable[[], bool] = lambda: False,
    deploying: "Callable[[], Deploy]" = lambda: lambda *_, **__: None,
) -> tuple[int, bool]:
    """Take part until the run ends; return the last round trained on, and False if `stop` ended it.

    `deploying` makes what lets the sensor's models be served; it is called once torch is there.

    Raises:
        UsageError: the file cannot be used, or this sensor is none of the federation's.
        BrokerError: there is no federation within `wait` seconds.
        EdgeNodeError: with what to do about it.
    """
    topics.check_node(name)
    disk.check_writable(state)
    rows.check()
    report(progress.Step(what=f"looking for a vertical federation on {endpoint}"))
    while True:
        spec = find_spec(endpoint, federation, wait, stop, state=state, report=report)
        if spec is None:
            return 0, False
        if name not in spec.sensors:
            raise UsageError(
                f"the federation {spec.federation!r} has no sensor {name!r}",
                f"its sensors are {', '.join(spec.sensors)}",
            )
        check_name_free(endpoint, spec.federation, name, state, "--sensor")
        from edge_node.extensions.vfl.client.session import take_part  # noqa: PLC0415  (torch takes seconds)
        from edge_node.extensions.vfl.client.session_state import NewRunError  # noqa: PLC0415

        try:
            return take_part(
                spec, name, rows, endpoint, state, report=report, stop=stop, deploying=deploying
            )
        except NewRunError as begun:
            report(progress.Note(text=f"the head has begun run {begun.run}: taking part in it"))
