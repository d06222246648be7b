"""The contract between machines, and the broker: protocol, MQTT, blob transfer, security, storage."""
