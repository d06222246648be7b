"""Measurements: each prints what it measured, ratios within one run."""
