"""The head of a vertical federation, as a process over MQTT."""
