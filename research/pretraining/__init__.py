"""How the weights that ship with the package were made."""
