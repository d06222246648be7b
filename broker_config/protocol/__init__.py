"""What is said, and where: topics, messages, frames, their bytes, and errors that name the fault and the remedy."""
