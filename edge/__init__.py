"""The line: inference on frames, its daemon, and the command line. Starts without torch installed."""
