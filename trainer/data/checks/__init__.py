"""Checks of a plant's images before it joins."""
