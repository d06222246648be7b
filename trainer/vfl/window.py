"""Which products a round trains on: by their positions in the order in which the head has numbered them."""

from broker_config.protocol.vfl_messages import Window


def span(window: Window, round_: int) -> tuple[int, int]:
    """First and past-the-end position of the products of round 1, 2, ... (paper VII-B)."""
    end = window.start + (round_ - 1) * window.chunk
    return (max(0, end - window.size) if window.size else 0), end
