"""A federation's run as its events tell it, for trackers."""

from trainer.progress import (
    AnyEvent,
    Contribution,
    FederationFinished,
    Gathering,
    Measured,
    RoundClosed,
    RoundOpened,
)

RUN = "0123456789abcdef"
SETTINGS = {
    "method": "afedcl",
    "training.learning_rate": 0.001,
    "training.augment": True,
    "nodes": 2,
}
BEGIN: list[AnyEvent] = [
    Gathering(federation="steel", run=RUN, nodes=2, rounds=3, settings=SETTINGS)
]


def round_events(round_: int, accuracy: float) -> list[AnyEvent]:
    """One round, in which plant-1 tells what it measured."""
    return [
        RoundOpened(round=round_),
        Contribution(node="plant-1", round=round_, weight=0.5, bytes=9_000_000),
        Contribution(node="plant-2", round=round_, weight=0.75, bytes=9_000_000),
        Measured(
            node="plant-1",
            round=round_,
            metrics={"accuracy": accuracy, "L_D": 0.5, "leave-one-out loss x": 1.0},
        ),
        RoundClosed(
            round=round_,
            contributors=["plant-1", "plant-2"],
            seconds=2.5,
            bytes_up=18_000_000,
            limited={"plant-2": {"weight": 0.8, "update": 1.0}},
        ),
    ]


END: list[AnyEvent] = [FederationFinished(rounds=3, bytes_up=0, bytes_down=0, seconds=9.0)]
