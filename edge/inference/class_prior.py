"""Class prior of a line: weights by which a model's class probabilities are multiplied,
outside the signed bundle.

A classifier that plants share tells classes apart which this plant never taught. While they are
rarer here than its own, they should count less: each probability is multiplied by its class's
weight, then all are divided by their sum. That is Bayes' rule under other class priors than in
training (Saerens, Latinne, Decaestecker 2002). No weight is 0: when such a class arrives, an image
that shows it clearly still gets its label.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from broker_config.protocol.errors import UsageError, suggest

UNTAUGHT = 0.2  # chosen by `research/studies/class_prior.py`
_LEAST = 1e-6
_MOST = 1e6

Floats = NDArray[np.floating]
F = TypeVar("F", bound=np.floating)


class Prior(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[prior]` of a line's settings: weights of classes,
    relative to 1 for each that this plant has taught.
    """

    # of each class that this plant never taught
    untaught: Annotated[float, Meta(ge=_LEAST, le=1)] = UNTAUGHT
    # of single classes, whoever taught them
    classes: dict[str, Annotated[float, Meta(ge=_LEAST, le=_MOST)]] = {}

    def override(self, options: Mapping[str, str]) -> "Prior":
        """The prior with the weights that a command's options give: `untaught`, or a class.

        UsageError for a wrong one.

        A class that is called `untaught` can be weighted in the file alone.
        """
        given = dict(options)
        fields: dict[str, object] = {"untaught": given.pop("untaught", self.untaught)}
        try:
            return msgspec.convert(fields | {"classes": self.classes | given}, Prior, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"--prior: {error}", "write for example --prior untaught=0.05 --prior scratches=2"
            ) from None

    def check_classes(self, classes: Sequence[str]) -> None:
        """UsageError when a weight is of a class that a model does not have."""
        if unknown := [name for name in self.classes if name not in classes]:
            raise UsageError(
                f"the prior has a weight for {unknown[0]!r}, none of the model's classes "
                f"{', '.join(classes)}",
                f"{suggest(unknown[0], classes)}, or leave it out of [prior.classes] and --prior",
            )

    def weights(self, classes: Sequence[str], trained: Collection[str]) -> Floats:
        """The weight of each of a model's classes, of which this plant has taught `trained`:
        [classes].
        """
        factors = []
        for name in classes:
            default = 1.0 if is_taught(name, trained) else self.untaught
            factors.append(self.classes.get(name, default))
        return np.array(factors)


def is_taught(name: str, trained: Collection[str]) -> bool:
    """Whether this plant has taught a class; True where `trained` is empty,
    since an old bundle does not say.
    """
    return not trained or name in trained


def reweight(probabilities: NDArray[F], weights: Floats) -> NDArray[F]:
    """Probabilities [..., classes] under class priors that differ from training by `weights`
    [classes].

    Each row sums to 1; where all weights are 1 the very same array is returned.
    """
    if np.all(weights == 1):
        return probabilities
    products = probabilities.astype(np.float64) * weights
    products /= products.sum(-1, keepdims=True)
    return products.astype(probabilities.dtype)
