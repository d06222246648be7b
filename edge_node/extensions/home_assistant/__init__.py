"""Home Assistant: a line's verdicts as entities, found there by themselves."""
