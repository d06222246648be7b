"""The papers' tables and figures: grids of simulated federations, their results, and what is drawn from them."""
