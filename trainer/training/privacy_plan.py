"""Plan of a private federation: whether its method can be, how much noise an epsilon takes,
and what a round spends.

What leaves a node in a round of training are models, made by steps along the sum of its images'
gradients, each cut to the length `clip`, with noise. If one image is replaced, that sum moves by 2
`clip` at most. Every step looks at all images: none are sampled, so nothing is claimed for chance
(De et al., 2022, find that large batches serve best anyway). What leaves in a round of sums moves
by `private_sums.SENSITIVITY` lengths at most.
"""

from collections.abc import Mapping
from math import inf, sqrt

import msgspec
from msgspec.structs import replace

from broker_config.protocol.errors import UsageError, suggest
from broker_config.protocol.messages import ImagePrivacy, Spec
from broker_config.protocol.round_contents import is_statistics_round
from trainer.methods import make
from trainer.methods.base import Method
from trainer.privacy.epsilon import DELTA, allowed_distance, spent_epsilon
from trainer.statistics.private_sums import SENSITIVITY

_GRADIENT_SENSITIVITY = 2.0  # in lengths of `clip`
_SHARE = 0.5  # of an epsilon's squared distance that sums get, where a method also trains
_DIGITS = 4  # of a noise that follows from an epsilon


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user asks for."""

    epsilon: float = 0.0
    noise: float = 0.0
    sums: float = 0.0
    clip: float = ImagePrivacy().clip


def make_privacy(asked: Mapping[str, str], method: Method, rounds: int) -> ImagePrivacy:
    """The noise of a federation, from `epsilon=E` for a node that takes part in all rounds,
    or from noise itself.

    Args:
        asked: NAME=VALUE, from a command line.
        method: of the federation.
        rounds: all of them.

    Raises:
        UsageError: the settings mean nothing.
    """
    if unknown := [name for name in asked if name not in _Asked.__struct_fields__]:
        raise UsageError(
            f"privacy has no setting {unknown[0]!r}", suggest(unknown[0], _Asked.__struct_fields__)
        )
    try:
        wanted = msgspec.convert(dict(asked), _Asked, strict=False)
        privacy = msgspec.convert(
            {"clip": wanted.clip, "noise": wanted.noise, "sums": wanted.sums}, ImagePrivacy
        )
    except msgspec.ValidationError as error:
        raise UsageError(
            f"privacy cannot be had with this value: {error}", "write for example epsilon=3"
        ) from error
    steps = (rounds - _count_messages(method)) * count_steps(method)
    messages = _count_messages(method)
    given = {
        name: value for name, value in (("noise", wanted.noise), ("sums", wanted.sums)) if value
    }
    needed = [name for name, count in (("noise", steps), ("sums", messages)) if count]
    if wanted.epsilon > 0 and not given:
        budget = allowed_distance(wanted.epsilon) ** 2
        share = _SHARE if steps and messages else 1.0
        return replace(
            privacy,
            noise=_round_up(_GRADIENT_SENSITIVITY * sqrt(steps / (budget * share))),
            sums=_round_up(SENSITIVITY * sqrt(messages / (budget * share))),
        )
    if wanted.epsilon or sorted(given) != sorted(needed):
        raise UsageError(
            "privacy needs either an epsilon, or the noise of all that leaves a node and "
            "nothing else",
            f"write --privacy epsilon=3, or {' '.join(f'--privacy {name}=10' for name in needed)}",
        )
    return privacy


def count_steps(method: Method) -> int:
    """Steps along noisy gradients in a round of training."""
    return sum(phase.epochs for phase in method.train)


def squared_distance(spec: Spec, method: Method, round_: int) -> float:
    """What a node's part in a round of a private federation spends, squared: see `epsilon`."""
    assert spec.privacy is not None
    if is_statistics_round(spec, round_):
        return _squared(SENSITIVITY, spec.privacy.sums)
    steps = count_steps(method)
    return steps * _squared(_GRADIENT_SENSITIVITY, spec.privacy.noise) if steps else 0.0


def planned_epsilon(spec: Spec) -> float:
    """Epsilon, at DELTA, of a node that takes part in all rounds of a private federation."""
    method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
    return spent_epsilon(
        sqrt(sum(squared_distance(spec, method, round_) for round_ in range(1, spec.rounds + 1)))
    )


def describe(spec: Spec) -> str:
    """What a private federation costs whoever takes part in all of it, and what that is,
    in a sentence.
    """
    return (
        "this federation is private: what leaves a node spends epsilon "
        f"{planned_epsilon(spec):.3g} of each of its training images, at delta {DELTA:g}, if it "
        "takes part in all rounds"
    )


def _squared(sensitivity: float, noise: float) -> float:
    if not noise:
        return inf
    distance = sensitivity / noise
    return distance * distance  # infinite where it is beyond a double


def _count_messages(method: Method) -> int:
    """Rounds in which a node sends sums."""
    return 0 if method.statistics is None else 1 + (method.statistics.begin is not None)


def _round_up(noise: float) -> float:
    """The next larger number of few digits, so that no more than the epsilon is spent."""
    if not noise:
        return 0.0
    return float(f"{noise * (1 + 0.5 * 10 ** (1 - _DIGITS)):.{_DIGITS}g}")
