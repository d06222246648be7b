"""Networks and their initial values; which models there are."""
