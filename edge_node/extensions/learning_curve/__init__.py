"""Learning curve: whether a plant has enough images, and which class wants more."""
