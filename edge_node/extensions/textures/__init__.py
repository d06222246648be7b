"""FedTFI (Peng et al., 2022): FedAvg, and nodes that exchange patches of feature maps."""
