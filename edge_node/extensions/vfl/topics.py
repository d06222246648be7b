"""Topics of vertical federated learning besides those of any federation."""

from broker_config.protocol.federation_kinds import KindTopic
from broker_config.protocol.topics import ROOT

KIND = "vfl"  # the level that they begin with, and the name of this kind of federation

TOPICS = (
    KindTopic("opened", "coordinator", ("node",)),
    KindTopic("representation", "coordinator", ("node",)),
    KindTopic("predictions", "coordinator", ("coordinator", "monitor")),
    KindTopic("+/embeddings", "node", ("coordinator",)),
    KindTopic("+/gradients", "coordinator", ("node",)),
    KindTopic("+/products", "node", ("coordinator",)),
)


def opened(federation: str) -> str:
    """VFL head -> its sensors: the round that opens."""
    return f"{ROOT}/{federation}/{KIND}/opened"


def representation(federation: str) -> str:
    """VFL head -> its sensors: what a round trains with."""
    return f"{ROOT}/{federation}/{KIND}/representation"


def predictions(federation: str) -> str:
    """VFL head's service -> whoever watches, the last one retained:
    one JSON object for each prediction.
    """
    return f"{ROOT}/{federation}/{KIND}/predictions"


def embeddings(federation: str, sensor: str) -> str:
    """Sensor -> VFL head: its embeddings of a round. `+` for any sensor."""
    return f"{ROOT}/{federation}/{KIND}/{sensor}/embeddings"


def gradients(federation: str, sensor: str) -> str:
    """VFL head -> one sensor: what that needs in a round, and nobody else may know."""
    return f"{ROOT}/{federation}/{KIND}/{sensor}/gradients"


def products(federation: str, sensor: str) -> str:
    """Sensor's service -> head's service: embeddings of single products. `+` for any sensor."""
    return f"{ROOT}/{federation}/{KIND}/{sensor}/products"
