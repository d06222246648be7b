"""Training: methods, the local engine, the federation's rounds, and a node's session."""
