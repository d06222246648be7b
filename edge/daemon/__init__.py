"""The line's long-lived process: start, serve, reload, drain, close; systemd, logs, metrics."""
