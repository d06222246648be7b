"""The experiments of the AFedCL paper (Cui et al., 2024)."""
