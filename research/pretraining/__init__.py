"""Pretraining of the weights that come with the package edge-node-weights."""
