"""Texture networks: FedTFI's and those it is compared with. Imports torch."""
