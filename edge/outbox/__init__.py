"""Durable storage of verdicts until every sink has them."""
