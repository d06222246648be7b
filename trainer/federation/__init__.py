"""Federated rounds over MQTT: the server (never torch) and its clients."""
