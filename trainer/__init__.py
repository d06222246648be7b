"""Learning: methods, models, data, training, and the federation's two sides."""
