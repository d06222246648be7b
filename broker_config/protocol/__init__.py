"""Protocol between machines: topics, messages, frames, their encoding, and errors."""
