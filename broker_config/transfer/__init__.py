"""Content-addressed blobs in chunks: the store, downloads, the send queue,
the slots of transfers.
"""
