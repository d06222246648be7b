"""Verdicts on disk until every sink has them."""
