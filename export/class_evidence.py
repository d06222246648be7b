"""Class evidence by place: the contribution of each place of an image,
where features are a sum over places.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from edge_node.extensions.textures.networks.musten import Codebook
from edge_node.extensions.textures.networks.texture_network import (
    CodebookHead,
    PooledHead,
    TextureNetwork,
)
from edge_node.extensions.textures.networks.trunk import GlobalAveragePooling
from trainer.models import backbones

Evidence = Callable[[Tensor], Tensor]
"""A head's weight -> [n, classes, h, w], whose mean over space is the head times the features.

The weight is [classes, features], or one for each image: [n, classes, features].
"""


def explain(encoder: nn.Module, inputs: Tensor) -> tuple[Tensor, Evidence | None]:
    """Features [n, features] of images, or of their stem's output, and the evidence of each place.

    The evidence is None where features are not a sum over places: nothing exact can be said then.
    """
    if not isinstance(encoder, TextureNetwork):
        return _explain_mean(backbones.feature_map(encoder, inputs))
    *before, last = [(name, part) for name, part in encoder.named_children() if name != "stem"]
    for name, part in before:
        inputs = part(inputs)[1] if name == "tel" else part(inputs)
    match last[1]:
        case GlobalAveragePooling():
            return _explain_mean(inputs[-1])
        case PooledHead():
            return _explain_pooled(last[1], inputs)
        case CodebookHead():
            return _explain_encoded(last[1], inputs)
        case other:
            return cast(Tensor, other(inputs)), None


def _explain_mean(maps: Tensor) -> tuple[Tensor, Evidence]:
    """Class activation maps (Zhou et al., 2016) of maps [n, features, h, w]."""
    return maps.mean((2, 3)), lambda head: (head @ maps.flatten(2)).unflatten(2, maps.shape[2:])


def _explain_pooled(part: PooledHead, tokens: Tensor) -> tuple[Tensor, Evidence]:
    hidden = part.hidden(tokens.mean(1))

    def evidence(head: Tensor) -> Tensor:
        back = _through_relu(head, hidden) @ part.hidden.weight
        return _to_square(back @ tokens.mT + _constant_evidence(head, hidden, part.hidden.bias))

    return torch.relu(hidden), evidence


def _explain_encoded(part: CodebookHead, tokens: Tensor) -> tuple[Tensor, Evidence]:
    """MusTEN's codes are sums over descriptors; what follows is linear,
    with the image's own attention, norm and ReLU.

    These are held fixed, so a map shows what a descriptor contributes to this output, not the
    output without it.
    """
    descriptors = part.reduce(tokens)  # [n, N, D]
    codebooks = [cast(Codebook, each) for each in part.musten.codebooks]
    shares = torch.cat([codebook.assign(descriptors) for codebook in codebooks], 2)  # [n, N, K]
    words = torch.cat([codebook.words for codebook in codebooks])  # [K, D]
    encoded = shares.mT @ descriptors - shares.sum(1).unsqueeze(2) * words
    weights = part.attention.attention_weights(encoded)  # [n, K, 1]
    rows = (weights * encoded).flatten(1)
    hidden = part.hidden(part.norm(rows))

    def evidence(head: Tensor) -> Tensor:
        back = (_through_relu(head, hidden) @ part.hidden.weight) * part.norm.weight
        deviation = (rows.var(1, correction=0) + part.norm.eps).sqrt()
        back = (back - back.mean(2, keepdim=True)) / deviation[:, None, None]
        back = back.unflatten(2, words.shape) * weights.unsqueeze(1)  # [n, classes, K, D]
        # [n, classes, K, N]
        residuals = back @ descriptors.mT.unsqueeze(1) - (back * words).sum(3, keepdim=True)
        added = (residuals * shares.mT.unsqueeze(1)).sum(2) * tokens.shape[1]
        shift = part.hidden.weight @ part.norm.bias + part.hidden.bias
        return _to_square(added + _constant_evidence(head, hidden, shift))

    return torch.relu(hidden), evidence


def _through_relu(head: Tensor, hidden: Tensor) -> Tensor:
    """The part of a head [(n,) classes, features] that passes the ReLU after `hidden` [n,
    features].
    """
    return head * (hidden > 0).unsqueeze(1)


def _constant_evidence(head: Tensor, hidden: Tensor, shift: Tensor) -> Tensor:
    """The evidence that no place contributes, [n, classes, 1]."""
    return (_through_relu(head, hidden) @ shift).unsqueeze(2)


def _to_square(added: Tensor) -> Tensor:
    """[n, classes, N] -> [n, classes, h, w], row by row, in the order of patches."""
    side = math.isqrt(added.shape[2])
    return added.reshape(*added.shape[:2], side, side)
