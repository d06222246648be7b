"""Uncertain verdicts, drift of what the line sees, and images kept for a person to look at."""
