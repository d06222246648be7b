"""Destinations of verdicts: one module for each kind."""
