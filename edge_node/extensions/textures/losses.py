"""Losses of FedTFI: cross-entropy with a triplet loss (eqs. 6 and 13), or on interpolated maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_node.extensions.textures.patches import Cells, Items, interpolate
from trainer.methods.base import (
    CLASSIFICATION_LOSS,
    Batch,
    Encode,
    Loss,
    Metric,
    classification_loss,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from edge_node.extensions.textures.options import Options
    from trainer.models.network import Network, Tensors


TRIPLET_LOSS = Metric(
    "L_T", "triplet loss", "Images with patches of other plants; 0 while there are none."
)
PATCHED = Metric(
    "patched",
    "patched images",
    "The share of a node's training images for which there are patches of other plants.",
)


def triplet_loss(options: Options) -> Loss:
    """L_C of the maps as they are + lambda L_T; without patches to put into them, L_C alone.

    Negatives are the same maps with patches of another label; with `use` "samples" the maps of
    another image.
    """

    def loss(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        import torch  # noqa: PLC0415  (the coordinator has none)

        maps = network.part("project", tensors, batch.images)
        use = (True,) if options.use == "samples" else (True, False)
        drawn = _draw(options, maps, batch, use)
        there = torch.stack([each for _, each in drawn]).all(0) if drawn else batch.labels < 0
        if drawn and options.use == "samples":
            others, differs = draw_others(batch.labels, batch.random)
            there = there & differs
        patched = there.float().mean()
        if not there.any():
            plain, reported = classification_loss(network, tensors, batch, encode)
            return plain, {
                **reported,
                TRIPLET_LOSS.key: torch.zeros_like(plain),
                PATCHED.key: patched,
            }
        embedded, features = _embed(
            network, tensors, torch.cat([maps, *(each[there] for each, _ in drawn)]), len(maps)
        )
        anchors = embedded[: len(maps)]
        (positive, *negatives) = embedded[len(maps) :].chunk(len(drawn))
        negative = negatives[0] if negatives else anchors[others[there]]
        apart = triplet_gaps(anchors[there], positive, negative, options.margin).mean()
        entropy = network.cross_entropy(
            network.linear(tensors, "classifier", features), batch.labels
        )
        return entropy + options.lam * apart, {
            CLASSIFICATION_LOSS.key: entropy,
            TRIPLET_LOSS.key: apart,
            PATCHED.key: patched,
        }

    return loss


def mixed_loss(options: Options) -> Loss:
    """L_C of maps with patches of the same label put into them, where there are any."""

    def loss(
        network: Network, tensors: Tensors, batch: Batch, encode: Encode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        maps = network.part("project", tensors, batch.images)
        drawn = _draw(options, maps, batch, (True,))
        if not drawn:
            plain, reported = classification_loss(network, tensors, batch, encode)
            return plain, {**reported, PATCHED.key: plain.new_zeros(())}
        ((changed, there),) = drawn
        maps = changed.where(there[:, None, None, None], maps)
        _, features = _embed(network, tensors, maps, len(maps))
        entropy = network.cross_entropy(
            network.linear(tensors, "classifier", features), batch.labels
        )
        return entropy, {CLASSIFICATION_LOSS.key: entropy, PATCHED.key: there.float().mean()}

    return loss


def triplet_gaps(anchors: Tensor, positives: Tensor, negatives: Tensor, margin: float) -> Tensor:
    """Eq. (6), its bracket in the usual place: max(0,
    m + |a - p| - |a - n|) of each row of [n, d], [n].
    """
    near: Tensor = (anchors - positives).norm(dim=1)
    far: Tensor = (anchors - negatives).norm(dim=1)
    return (margin + near - far).clamp(min=0)


def _draw(
    options: Options, maps: Tensor, batch: Batch, same: tuple[bool, ...]
) -> list[tuple[Tensor, Tensor]]:
    """Maps with patches of the same label, or of another one,
    and in which samples there are any; none for no bank.
    """
    patches = batch.received["bank.patches"]
    of = batch.received["bank.labels"]
    random = batch.random
    if random is None or not (of >= 0).any():
        return []
    cells = Cells.draw(maps, options.mask, options.channels, options.swaps, random)
    drawn = [Items.draw(batch.labels, of, cells, random, same=each) for each in same]
    return [(interpolate(maps, patches, items, cells), items.there) for items in drawn]


def draw_others(labels: Tensor, random: Generator | None) -> tuple[Tensor, Tensor]:
    """For each image of a batch, labels [n], the row of one of another label [n],
    and for which there is one [n].
    """
    import torch  # noqa: PLC0415

    other = labels[:, None] != labels
    there = other.any(1)
    weights = torch.where(there[:, None], other, torch.ones_like(other)).float()
    return torch.multinomial(weights, 1, generator=random)[:, 0], there


def _embed(network: Network, tensors: Tensors, maps: Tensor, anchors: int) -> tuple[Tensor, Tensor]:
    """F of all maps, TEL's output token or else the features,
    and the features of the first `anchors`.
    """
    if any(name.startswith("encoder.tel.") for name in tensors):
        token, tokens = network.part("tel", tensors, maps)
        return token, network.part("encoding", tensors, tokens[:anchors])
    features = network.part("encoding", tensors, network.part("patches", tensors, maps))
    return features, features[:anchors]
