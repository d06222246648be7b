"""Durable storage: files and databases that a power cut never leaves half written."""
