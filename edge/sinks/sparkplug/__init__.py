"""Outcomes as Eclipse Sparkplug B 3.0.0: the line is an edge node, its inspection a device.

`payload` writes and reads the messages, `metrics` says what they hold, `node` is the edge node as a state machine
without input and output, `sink` connects that to a broker. They need protobuf; this module does not.
"""

from msgspec import Struct


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="sparkplug"):
    """`[[sinks]] kind = "sparkplug"`: metrics for a SCADA host."""

    url: str
    group: str
    node: str = ""  # the line's name
    device: str = "inspection"
    host: str = ""  # the primary host application that must be online; none is waited for
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
