"""The line's bundles on disk, and which is served: rollout with gate, probation and rollback; delivery over MQTT."""
