"""Labelling of a line's images by people: queue, order, the plant's image folder, history."""
