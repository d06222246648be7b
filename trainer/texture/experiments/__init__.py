"""The experiments of the FedTFI paper: Tables 2 and 4, Figures 6 to 10, tuning, and what personalisation adds."""
