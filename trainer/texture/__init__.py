"""Texture networks (FedTFI and what it is compared with), and their experiments. Imports torch."""
