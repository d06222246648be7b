"""Attacks that a plant runs on its own images: what whoever runs a federation could see of them."""
