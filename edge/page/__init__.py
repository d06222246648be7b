"""The page for the person beside the line."""
