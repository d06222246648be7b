"""A node's sums of its images' features: made, released with noise, taken apart, and deployed."""

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Spec
from trainer.data.class_folders import LabelledImages
from trainer.data.training_set import TrainingSet
from trainer.methods.base import Method
from trainer.models.fusion import LENGTH
from trainer.models.named_tensors import Arrays, add_prefix, strip_prefix
from trainer.models.network import Network, Tensors, to_arrays, to_tensors
from trainer.privacy.noise import derive_key, draw_normal
from trainer.statistics.features import view_features
from trainer.statistics.sums import PREFIX, choose_images

_EXACT = "exact"  # prefix of a node's sums where others leave it
_NEVER = 10.0  # how far the logit of a class that is not to be named lies below all others


class NodeStatistics:
    """The part of a node that knows sums; for a method that exchanges them.

    Args:
        spec: of the federation.
        method: with `statistics`.
        network: the encoder's structure.
        images: the node's training images.
        device: where tensors lie.
        secret: of the node; the noise of a release is drawn from it.
        without: labels that the head must never name.
    """

    def __init__(
        self,
        spec: Spec,
        method: Method,
        network: Network,
        images: LabelledImages,
        device: str,
        secret: str,
        without: Collection[int] = (),
    ):
        assert method.statistics is not None
        self._spec = spec
        self._statistics = method.statistics
        self._network = network
        self._images = images
        self._device = device
        self._secret = secret
        self._without = sorted(without)
        # positions of the images that statistics are of
        self.counted = choose_images(images.labels)
        self.labels = images.labels[self.counted]
        self._features: tuple[bytes, Arrays] | None = None

    @property
    def _is_private(self) -> bool:
        """Whether what leaves of the node's sums is not the sums themselves."""
        return self._statistics.release is not None

    def features(self, received: Tensors, data: TrainingSet) -> Arrays:
        """Return what the sums are of, a row for each image that counts.

        Those of the last encoder are kept: a frozen one is asked twice, for the sums and to judge.
        """
        digest = hashlib.blake2b()
        for name, value in sorted(received.items()):
            if "encoder" in name or name.startswith("candidate"):
                digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
        if self._features is None or self._features[0] != digest.digest():
            torch.set_num_threads(self._spec.threads)
            with self._naming_run():
                made = self._statistics.features(self._network, received, self.take(data))
            self._features = digest.digest(), made
        return self._features[1]

    def views(self, features: Arrays, received: Tensors, data: TrainingSet) -> np.ndarray:
        """Return features [n, VIEWS, d] of the images that count, as the encoder gives them.

        Those among `features` are taken, where they are what the sums are of.
        """
        if self._statistics.views is not None:
            return features[self._statistics.views]
        return view_features(self._network, received, self.take(data))

    def take(self, data: TrainingSet) -> TrainingSet:
        """Return the images that count."""
        return data._replace(
            images=data.images[self.counted], labels=data.labels[self.counted], stem_output=None
        )

    def sum(self, features: Arrays, kept: np.ndarray | slice = slice(None)) -> Tensors:
        """Return the sums of the images at the positions `kept` among those that count."""
        rows = {name: each[kept] for name, each in features.items()}
        with self._naming_run():
            made = self._statistics.make(rows, self.labels[kept], len(self._spec.classes))
        return self._tensors(made)

    def keep(self, tensors: Tensors, features: Arrays) -> Tensors:
        """Return a node's tensors with its sums, made anew."""
        sums = self.sum(features)
        kept = add_prefix(_EXACT, sums) if self._is_private else sums
        return {**tensors, **kept}

    def release(
        self, tensors: Tensors, received: Tensors, data: TrainingSet, basis: str
    ) -> Tensors:
        """Return the tensors with what leaves of the sums, where that is not the sums themselves.

        The noise follows from the node's secret, the sums and `basis`, the digest of all that the
        round begins with.
        """
        release = self._statistics.release
        if release is None:
            return tensors
        exact = self.exact(tensors)
        parts = (exact[name].tobytes() for name in sorted(exact))
        key = derive_key(self._secret.encode(), b"sums", basis.encode(), *parts)

        def normal(name: str, count: int) -> np.ndarray:
            return np.asarray(draw_normal([derive_key(key, name.encode())], count)[0])

        with self._naming_run():
            released = release(self._network, received, data, exact, normal)
        return {**tensors, **self._tensors(released)}

    def sent(self, tensors: Tensors) -> Arrays:
        """Return the sums among a node's tensors, as they have left it."""
        return to_arrays({name: tensors[name] for name in self._spec.statistics})

    def exact(self, tensors: Tensors) -> Arrays:
        """Return the sums among a node's tensors, as its images make them."""
        if self._is_private:
            return to_arrays(strip_prefix(_EXACT, tensors))
        return self.sent(tensors)

    def may_hold(self, totals: Arrays, tensors: Tensors) -> bool:
        """Return whether totals can hold the node's sums, as far as these tell.

        Sums of few images lie in few directions. Taken out of totals that do not hold them, they
        nearly always leave what no plants can have.
        """
        if not tensors.keys() >= self._spec.statistics.keys():
            return False  # what has left of private sums is not known any more
        others = add_statistics(totals, self.sent(tensors), -1)
        try:
            self._statistics.check_totals(others, self._spec.nodes)
        except ValueError:
            return False
        return True

    def without_own(self, tensors: Tensors, final: Arrays, *, counted: bool) -> Arrays:
        """Return the result of a run with the other nodes' totals.

        Args:
            tensors: of the node, with its sums if the totals hold them.
            final: the result.
            counted: whether they do.

        Raises:
            EdgeNodeError: no nodes can have such totals.
        """
        others = add_statistics(final, self.sent(tensors), -1) if counted else final
        try:
            self._statistics.check_totals(others, self._spec.nodes)
        except ValueError as error:
            raise EdgeNodeError(
                "the coordinator's totals cannot be sums over the plants, this one among them",
                "nothing was made of them: have whoever runs the coordinator look at its "
                "machine, then start a new run",
            ) from error
        return others

    def count_images(self, others: Arrays) -> np.ndarray:
        """Return how many images the other plants have of each class, [C], as far as is known."""
        count = others.get(f"{PREFIX}.images")
        if count is None or self._is_private:
            return np.zeros(len(self._spec.classes))
        return count

    def deploy(self, own: Tensors, others: Arrays, *, served: bool) -> Tensors:
        """Return the personal model of these sums of the node and of totals of the other nodes."""
        with self._naming_run():
            made = self._statistics.deploy(self._network, own, self._tensors(others), served)
        return _without(made, self._without)

    @contextlib.contextmanager
    def _naming_run(self) -> Iterator[None]:
        """Raise EdgeNodeError where an encoder or totals are such that numpy has no result.

        Both come from the coordinator; values that its sums can have may still be absurd.
        """
        try:
            yield
        except ValueError as error:  # numpy's errors of linear algebra, too
            raise EdgeNodeError(
                f"with the encoder or the totals of run {self._spec.run} of federation "
                f"{self._spec.federation!r} this node can make no sums or no model: {error}",
                "ask the coordinator's operator whether the run began with the right weights "
                "(--weights), then start a new run",
            ) from error

    def _tensors(self, arrays: Arrays) -> Tensors:
        return to_tensors(arrays, self._device)


def add_statistics(broadcast: Arrays, sums: Arrays, sign: int = 1) -> Arrays:
    """Return the result of a run with a node's sums added to the totals, or taken out of them."""
    return {**broadcast, **{name: broadcast[name] + sign * values for name, values in sums.items()}}


def _without(personal: Tensors, labels: Sequence[int]) -> Tensors:
    """Return a model of normalised features that never names these classes.

    Their logits are below all others' least ones.
    """
    if not labels:
        return personal
    weight = personal["classifier.weight"].clone()
    bias = personal["classifier.bias"].clone()
    lowest = (bias - personal[LENGTH] * weight.norm(dim=1)).min()
    weight[labels] = 0
    bias[labels] = lowest - _NEVER
    return {**personal, "classifier.weight": weight, "classifier.bias": bias}
