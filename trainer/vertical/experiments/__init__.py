"""The experiments of the DAO-VFL paper: its figures, its regret, and a centralised model with the same network."""
