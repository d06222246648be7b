"""Bundles delivered to lines over MQTT."""
