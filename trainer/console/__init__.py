"""The console of a federation: a page that shows its nodes and rounds, live and afterwards."""
