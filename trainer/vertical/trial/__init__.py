"""Products to try a line with: drawn ones, and those of C-MAPSS."""
