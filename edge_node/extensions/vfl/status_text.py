"""Status of a vertical federation in words."""

from broker_config.protocol.federation_kinds import StatusText
from edge.terminal.formatting import format_rate, format_validation, pluralize
from edge_node.extensions.vfl.messages import VflOverview

_TITLES = ("state", "latency", "iterations")


def describe_status(name: str, overview: VflOverview, online: bool) -> StatusText:
    """Return its progress, its sensors, and what it waits for; `online`: its head is connected."""
    running = overview.status in ("gathering", "open")
    state = {"open": "learning"}.get(overview.status, overview.status)
    if overview.paused and running:
        state = "paused"
    loss = "" if overview.loss is None else f", loss {overview.loss:.3f}"
    rate = f", {format_rate(overview.rate)}" if running and online and overview.rate else ""
    notices = []
    if running and not online:
        notices.append("the head is offline: sensors wait for it, and go on when it is back")
    elif running and overview.awaited and not any(sensor.lacks for sensor in overview.sensors):
        notices.append(f"waiting for {overview.awaited}")
    rows = {}
    for sensor in overview.sensors:
        present = "" if sensor.present or not running else "absent"
        latency = "" if sensor.latency is None else f"{1000 * sensor.latency:.0f} ms"
        cells = (present, latency, str(sensor.iterations or ""))
        rows[sensor.name] = dict(zip(_TITLES, cells, strict=True))
    validation = [format_validation(overview.validation)] if overview.validation else []
    return StatusText(
        title=f"vertical federation {name}: {pluralize(len(rows), 'sensor')}",
        lines=(f"{state}: {pluralize(overview.round, 'round')} closed{loss}{rate}", *validation),
        notices=notices,
        titles=_TITLES,
        rows=rows,
        remarks=[
            f"waiting for {sensor.name}, which lacks {sensor.lacks}"
            for sensor in overview.sensors
            if sensor.lacks
        ],
    )
