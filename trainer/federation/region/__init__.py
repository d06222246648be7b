"""Relays: coordinators of a region's nodes that are a node of the federation above."""
