"""The experiments of the DAO-VFL paper (Wang et al., 2025)."""
