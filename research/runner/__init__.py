"""The runner of all papers' experiments: cells, their store, processes, Ray, statistics, tables."""
