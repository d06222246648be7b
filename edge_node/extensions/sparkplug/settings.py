"""Settings of the sink for Sparkplug; they load protobuf only when the sink is opened."""

from broker_config.protocol.errors import UsageError
from edge.config.broker_settings import BrokerSettings
from edge.config.instance import Instance
from edge.sinks.sink import Origin, Sink


class Settings(BrokerSettings, frozen=True, kw_only=True, tag_field="kind", tag="sparkplug"):
    """`[[sinks]] kind = "sparkplug"`: metrics for a SCADA host."""

    group: str
    node: str = ""  # the line's name
    device: str = "inspection"
    host: str = ""  # the primary host application that must be online; none is waited for

    def open_sink(self, instance: Instance, origin: Origin) -> Sink:
        """Open the sink; UsageError if it cannot be used as it is set, or lacks protobuf."""
        try:
            from edge_node.extensions.sparkplug.birth_state import BirthState  # noqa: PLC0415
            from edge_node.extensions.sparkplug.edge_node import Identity  # noqa: PLC0415
            from edge_node.extensions.sparkplug.sparkplug_sink import Sparkplug  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise UsageError(
                f"Sparkplug needs protobuf, which is not installed here: {error}",
                "install it: pip install 'edge-node[sparkplug]'",
            ) from error

        endpoint = self.endpoint()
        node = self.node or instance.line
        identity = Identity(self.group, node, self.device, self.host).check()
        folder = instance.state / "sparkplug"
        return Sparkplug(endpoint, identity, BirthState(folder, endpoint, identity))
