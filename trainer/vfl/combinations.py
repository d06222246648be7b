"""What a line's protection and denoising may not be together. Itself without torch."""

from broker_config.protocol.errors import UsageError
from broker_config.protocol.vfl_messages import VflSpec


def check(spec: VflSpec) -> None:
    """UsageError, with the reason, for settings that contradict one another."""
    privacy, denoising = spec.privacy, spec.denoising
    if bool(privacy.clip) != bool(privacy.multiplier):
        raise UsageError(
            "embeddings are protected by a clip and noise together, and one of them is 0",
            "give both --clip and --protect, or neither",
        )
    if privacy.clip and denoising.rounds and denoising.target == "clean":
        raise UsageError(
            "the embeddings are to be protected, but the denoiser asks for them as they are",
            "add --denoise-with noisy, or leave out --denoise",
        )
    if denoising.rounds and denoising.target == "noisy":
        _check_copies(spec)


def _check_copies(spec: VflSpec) -> None:
    """Two copies that a denoiser learns from differ, and their errors have mean zero."""
    channel = spec.channel
    if channel.levels and not channel.dither:
        raise UsageError(
            "the denoiser cannot learn from two copies of what a quantiser rounds: it rounds both alike",
            "have the quantiser dither (--noise levels=3,dither), or leave out --denoise-with noisy",
        )
    if not (channel.levels or channel.sigma or spec.privacy.clip):
        raise UsageError(
            "the denoiser cannot learn from two copies on this channel: both are the same", "leave out --denoise"
        )
