"""Registry of a line's bundles: store, rollout with gate, probation and rollback,
delivery over MQTT.
"""
