"""Whole stories on one machine, in real processes."""
