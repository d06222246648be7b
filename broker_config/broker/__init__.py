"""Brokers that edge-node starts: mosquitto, or amqtt where there is none."""
