"""Differential privacy of images: noise from a secret, what it hides,
and the account of what has left a node.
"""
