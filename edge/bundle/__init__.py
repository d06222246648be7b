"""Bundles, the deployable models: format, verification, expiry warnings."""
