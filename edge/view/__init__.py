"""From frame to verdict: what of a frame the model sees, and what its tiles' classes mean for the part."""
