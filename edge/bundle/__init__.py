"""The deployable model, a folder: its format, its verification, its end of validity."""
