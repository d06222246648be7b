"""Brokers that we start: mosquitto, or amqtt where there is none."""
