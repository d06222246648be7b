"""Uncertainty of verdicts, drift detection,
and retention of images that a person should look at.
"""
