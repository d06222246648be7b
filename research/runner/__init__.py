"""What the experiments of all papers share: cells, their store, processes, Ray, statistics."""
