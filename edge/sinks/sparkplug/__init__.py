"""Outcomes as Eclipse Sparkplug B 3.0.0: the line is an edge node, its inspection a device.

`payload` encodes and decodes the messages, `line_metrics` defines their contents, `edge_node` is
the edge node as a state machine without input and output, `sparkplug_sink` connects it to a broker.
They need protobuf; this module does not.
"""

from edge.config.broker_settings import BrokerSettings


class Settings(BrokerSettings, frozen=True, kw_only=True, tag_field="kind", tag="sparkplug"):
    """`[[sinks]] kind = "sparkplug"`: metrics for a SCADA host."""

    group: str
    node: str = ""  # the line's name
    device: str = "inspection"
    host: str = ""  # the primary host application that must be online; none is waited for
