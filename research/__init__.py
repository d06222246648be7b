"""The papers' experiments, their results, and one-off studies. Not in the wheel: `python -m research`."""
