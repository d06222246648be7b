"""A line as processes: head and sensors over MQTT, each with its own disk."""
