"""The contract between nodes: topics, messages, tensors as bytes, and the link to the broker."""
