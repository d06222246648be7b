"""What whoever runs a federation could see of a plant's images: attacks that the plant runs on its own images."""
