"""The address of the command line in version 0.1; it is `edge_node.cli` now."""
