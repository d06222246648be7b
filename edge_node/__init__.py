"""The product as a person meets it: the command line."""
