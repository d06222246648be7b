"""Labelled images: class folders, public data sets, drawn ones, their partition among plants."""
