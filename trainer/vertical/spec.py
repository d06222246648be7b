"""What a line's settings may not be together."""

from broker_config.errors import UsageError, nearest
from broker_config.vertical import LineSpec
from trainer.vertical.networks import NETWORKS


def check(spec: LineSpec) -> None:
    """UsageError, with the reason, for settings that contradict one another."""
    if len(set(spec.sensors)) < len(spec.sensors):
        raise UsageError("two sensors of the line have the same name", "give each sensor a name of its own")
    if len(set(spec.classes)) < len(spec.classes):
        raise UsageError("two classes have the same name", "name each class once")
    if spec.network not in NETWORKS:
        raise UsageError(f"there is no feature model {spec.network!r}", nearest(spec.network, NETWORKS))
    if spec.reading == "expectation" and not all(map(_is_number, spec.classes)):
        raise UsageError(
            "the mean of the classes is asked for, but not all of them are numbers",
            "name the classes by numbers, or ask for the likeliest class",
        )
    _check_privacy(spec)
    _check_denoising(spec)


def _check_privacy(spec: LineSpec) -> None:
    privacy = spec.privacy
    if bool(privacy.clip) != bool(privacy.multiplier):
        raise UsageError(
            "embeddings are protected by a clip and noise together, and one of them is 0",
            "give both the clip and the noise multiplier, or neither",
        )
    if privacy.clip and spec.denoising.rounds and spec.denoising.target == "clean":
        raise UsageError(
            "the embeddings are to be protected, but the denoiser asks for them as they are",
            "let it learn from a second noisy copy (target: noisy), or do without it (rounds: 0)",
        )


def _check_denoising(spec: LineSpec) -> None:
    channel = spec.channel
    if not spec.denoising.rounds or spec.denoising.target == "clean":
        return
    if channel.levels and not channel.dither:
        raise UsageError(
            "the denoiser cannot learn from two noisy copies of what a quantiser rounds: it rounds both alike",
            "add dither to the quantiser (levels=3,dither), or give clean embeddings to learn from (target: clean)",
        )
    if not (channel.levels or channel.sigma or spec.privacy.clip):
        raise UsageError(
            "the denoiser cannot learn from two noisy copies: on this channel both are the same",
            "do without it (rounds: 0)",
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
