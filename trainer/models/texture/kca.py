"""KCA, keyword consistency attention (FedTFI, section 3.3): which words of all codebooks matter."""

import torch
from torch import Tensor, nn


class KeywordAttention(nn.Module):
    """Eqs. (10) and (11): s = softmax(w^T tanh(V E^T)) over the rows of E; each row is scaled by its s."""

    def __init__(self, depth: int, hidden: int):
        super().__init__()
        self.hidden = nn.Linear(depth, hidden, bias=False)  # V
        self.score = nn.Linear(hidden, 1, bias=False)  # w

    def forward(self, encoded: Tensor) -> Tensor:
        """[n, K, depth] -> [n, K, depth]."""
        return self.weigh(encoded) * encoded

    def weigh(self, encoded: Tensor) -> Tensor:
        """How much each row of [n, K, depth] counts, [n, K, 1]."""
        return torch.softmax(self.score(torch.tanh(self.hidden(encoded))), 1)
