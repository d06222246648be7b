"""One-off studies: each answers one question about the methods, on real or drawn data."""
