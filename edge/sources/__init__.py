"""Origins of images: one module for each kind."""
