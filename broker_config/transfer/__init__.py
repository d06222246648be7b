"""Content-addressed blobs in chunks: the store, downloads, the send queue and its scheduling."""
