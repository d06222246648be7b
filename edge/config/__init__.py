"""Options and settings in TOML files."""
