"""MusTEN and KCA (FedTFI, section 3.3): descriptors encoded by learnable codebooks,
and attention to their words.
"""

import torch
from torch import Tensor, nn

# lower bound of squared distances: rounding errors are as large, and the root's slope at 0 is
# infinite
_NEAR = 1e-6


class Codebook(nn.Module):
    """Residuals between descriptors and words, softly assigned and summed: eqs. (7) and (8).

    With `squared` distances it is the encoding layer of Deep-TEN (Zhang et al., 2017).
    """

    def __init__(self, words: int, depth: int, *, squared: bool = False):
        super().__init__()
        self.squared = squared
        bound = (words * depth) ** -0.5
        self.words = nn.Parameter(torch.empty(words, depth).uniform_(-bound, bound))
        self.smoothing = nn.Parameter(torch.rand(words))

    def forward(self, descriptors: Tensor) -> Tensor:
        """[n, N, depth] -> [n, words, depth]."""
        assigned = self.assign(descriptors)
        return assigned.mT @ descriptors - assigned.sum(1).unsqueeze(2) * self.words

    def assign(self, descriptors: Tensor) -> Tensor:
        """The share of each descriptor [n, N, depth] that each word is assigned, eq.

        (8): [n, N, words].
        """
        return torch.softmax(-self.smoothing * self._distances(descriptors), -1)

    def _distances(self, descriptors: Tensor) -> Tensor:
        """[n, N, words], without computing the residuals:
        they would take `depth` times the memory.
        """
        lengths = descriptors.square().sum(2, keepdim=True) + self.words.square().sum(1)
        squares = (lengths - 2 * descriptors @ self.words.mT).clamp(min=_NEAR)
        return squares if self.squared else squares.sqrt()


class MultiScale(nn.Module):
    """Codebooks of several sizes, their outputs concatenated, eq. (9)."""

    def __init__(self, codebooks: tuple[int, ...], depth: int, *, squared: bool = False):
        super().__init__()
        self.codebooks = nn.ModuleList(
            Codebook(words, depth, squared=squared) for words in codebooks
        )

    def forward(self, descriptors: Tensor) -> Tensor:
        """[n, N, depth] -> [n, words of all codebooks, depth]."""
        return torch.cat([codebook(descriptors) for codebook in self.codebooks], 1)


class KeywordAttention(nn.Module):
    """KCA, keyword consistency attention, eqs. (10) and (11).

    s = softmax(w^T tanh(V E^T)) over the rows of E, each of which is scaled by its s.
    """

    def __init__(self, depth: int, hidden: int):
        super().__init__()
        self.hidden = nn.Linear(depth, hidden, bias=False)  # V
        self.score = nn.Linear(hidden, 1, bias=False)  # w

    def forward(self, encoded: Tensor) -> Tensor:
        """[n, K, depth] -> [n, K, depth]."""
        return self.attention_weights(encoded) * encoded

    def attention_weights(self, encoded: Tensor) -> Tensor:
        """The weight of each row of [n, K, depth]: [n, K, 1]."""
        return torch.softmax(self.score(torch.tanh(self.hidden(encoded))), 1)
