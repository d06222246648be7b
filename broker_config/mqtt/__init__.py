"""One MQTT connection: address, handshake, reconnection, and two clients with one id."""
