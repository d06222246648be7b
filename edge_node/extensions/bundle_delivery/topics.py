"""Topics on which bundles travel to a line, on the plant's own broker."""

from broker_config.protocol.topics import ROOT


def namespace(line: str) -> str:
    """In place of a federation's name in `want` and `chunks` of a line's bundles."""
    return f"lines/{line}"


def offers(line: str) -> str:
    """Whoever has a bundle for a line -> its daemon."""
    return f"{ROOT}/{namespace(line)}/bundles/offer"


def answers(line: str) -> str:
    """Line daemon -> whoever offers it a bundle."""
    return f"{ROOT}/{namespace(line)}/bundles/answer"
