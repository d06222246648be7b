"""Initial weights of edge-node's encoders, as files.

`trainer/models/weights_package.py` of edge-node finds them.
"""
