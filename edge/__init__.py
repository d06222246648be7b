"""The line: bundles, prediction, the daemon and the command line. Starts without torch installed."""
