"""The life of a line's models: where bundles are kept, how one comes to be served, and how the line goes back."""
