"""Outcomes as Eclipse Sparkplug B 3.0.0: the line is an edge node, its inspection a device.

`payload` encodes and decodes the messages, `line_metrics` defines their contents, `edge_node` is
the edge node as a state machine without input and output, `sparkplug_sink` connects it to a broker.
They need protobuf; `settings` does not.
"""
