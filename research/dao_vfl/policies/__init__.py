"""Training an agent that decides local iterations, and comparing it with rules."""
