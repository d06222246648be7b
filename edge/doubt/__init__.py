"""Knowing when the model does not know: doubtful verdicts, drift of what the line sees, and kept images."""
