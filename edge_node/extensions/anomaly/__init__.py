"""Anomaly detection: bundles from good images alone, for lines that have no labels yet."""
