"""Account of a node: each release of what its images have shaped,
and what all of them have spent together.
"""

from collections.abc import Callable, Sequence
from math import inf, sqrt

from msgspec import Struct
from msgspec.structs import replace

from broker_config.protocol.errors import EdgeNodeError
from trainer.privacy.epsilon import spent_epsilon


class Release(Struct, frozen=True, kw_only=True):
    """A node's part in a round."""

    run: str
    round: int
    # digest of what it was made of: the same, made again, is the same to the byte, and tells
    # nothing new
    basis: str
    squared: float  # distance
    digest: str = ""  # of the bytes that left; "" before they are known, and in version 0.1


class Account:
    """All releases of a node's images. `keep` writes them down before anything can leave.

    Raises, when something is to be spent:
        EdgeNodeError: more than `most` would be.
    """

    def __init__(
        self,
        releases: Sequence[Release] = (),
        keep: Callable[[Sequence[Release]], None] = lambda _: None,
        most: float = inf,
    ):
        self._releases = [*releases]
        self._keep = keep
        self._most = most

    @property
    def epsilon(self) -> float:
        """What is spent of each image, in this run and all earlier ones."""
        return self._epsilon_with(0.0)

    def knows(self, run: str) -> bool:
        """Return whether anything of a run is on the account."""
        return any(each.run == run for each in self._releases)

    def spend(self, run: str, round_: int, basis: str, squared: float) -> None:
        """Write down what is about to be made, unless it was made before."""
        if any(
            (each.run, each.round, each.basis) == (run, round_, basis) for each in self._releases
        ):
            return
        epsilon = self._epsilon_with(squared)
        if not epsilon <= self._most:  # also what is no number
            raise EdgeNodeError(
                f"round {round_} would spend epsilon {epsilon:.3g} of this plant's images, "
                f"and it demands {self._most:.3g} at most",
                "nothing of this round has left; join again with a larger --demand epsilon, or "
                "stay out",
            )
        releases = [*self._releases, Release(run=run, round=round_, basis=basis, squared=squared)]
        self._keep(releases)
        self._releases = releases

    def confirm(self, run: str, round_: int, basis: str, digest: str) -> None:
        """Write down the bytes of a release before they leave.

        Raises:
            EdgeNodeError: others have left, or may have: both would tell more than one.
        """
        releases = []
        for each in self._releases:
            is_meant = (each.run, each.round, each.basis) == (run, round_, basis)
            if is_meant and each.digest not in ("", digest):
                raise EdgeNodeError(
                    f"this node cannot rebuild what it may have sent in round {round_}",
                    "ask the coordinator's operator to close the round without this node, then "
                    "join again",
                )
            if is_meant:
                releases.append(replace(each, digest=digest))
            else:
                releases.append(each)
        if releases != self._releases:
            self._keep(releases)
            self._releases = releases

    def _epsilon_with(self, squared: float) -> float:
        return spent_epsilon(sqrt(sum(each.squared for each in self._releases) + squared))
