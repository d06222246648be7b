"""MQTT client: address, handshake, reconnection, event queue,
and detection of two clients with one id.
"""
