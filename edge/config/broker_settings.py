"""Settings of a connection to an MQTT broker, which sources and sinks share."""

from pathlib import Path

from msgspec import Struct

from broker_config.mqtt.endpoint import Endpoint


class BrokerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker's address and the files for TLS."""

    url: str
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def endpoint(self) -> Endpoint:
        """The broker's endpoint; UsageError when the address or a file cannot be used."""
        paths = []
        for each in (self.ca, self.cert, self.key):
            path = Path(each) if each else None
            paths.append(path)
        ca, cert, key = paths
        endpoint = Endpoint.parse(self.url, ca=ca, cert=cert, key=key)
        if endpoint.tls:
            endpoint.tls_context()  # finds unusable files now
        return endpoint
