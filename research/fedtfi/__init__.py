"""The experiments of the FedTFI paper (Peng et al., 2022)."""
