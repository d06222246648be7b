"""Keeping a line in service: systemd, logs, what is read again while it runs."""
