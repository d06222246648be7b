"""The papers' tables and figures: grids of simulated federations, their results on disk, and what is drawn from them."""
