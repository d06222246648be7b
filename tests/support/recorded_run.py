"""A coordinator's state folder as a run leaves it, without the run."""

import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from broker_config.protocol.messages import Preprocessing, Spec, Training
from broker_config.storage.database import Statement
from trainer.federation.server.journal import Blob, Journal
from trainer.progress import (
    Activity,
    AnyEvent,
    Contribution,
    FederationFinished,
    Gathering,
    Late,
    Measured,
    NodeJoined,
    NodeLost,
    RoundClosed,
    RoundOpened,
)
from trainer.progress.event_log import FILE, Logged

RUN = "0123456789abcdef"
BLOB = Blob("0" * 64, 9_000_000)
MINUTE = 60.0  # seconds from one round to the next


def make_spec(run: str = RUN, *, nodes: int = 3, rounds: int = 5, method: str = "afedcl") -> Spec:
    return Spec(
        federation="steel",
        run=run,
        software="0.1.0",
        method=method,
        options={},
        model="small",
        classes=("inclusion", "patches", "scratches"),
        training=Training(),
        rounds=rounds,
        nodes=nodes,
        quorum=nodes,
        preprocessing=Preprocessing(size=32, mean=(0, 0, 0), std=(1, 1, 1)),
        seed=7,
        sends=(),
        tensors={},
    )


def record_run(
    folder: Path,
    run: str = RUN,
    *,
    nodes: int = 3,
    rounds: int = 5,
    method: str = "afedcl",
    contributed: int = 0,
) -> list[str]:
    """Write a run into a state folder; return its nodes.

    If so many have `contributed`, its last round is open.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"plant-{number}" for number in range(1, nodes + 1)]
    begun, statements = time.time() - MINUTE * rounds, list[Statement]()
    journal = Journal(folder)
    journal.begin(make_spec(run, nodes=nodes, rounds=rounds, method=method), BLOB)
    for name in names:
        journal.admit(run, name, "")
    with (folder / FILE).open("ab") as log:

        def write(seconds: float, event: AnyEvent) -> None:
            log.write(msgspec.json.encode(Logged(begun + seconds, event)) + b"\n")

        write(0, Gathering(federation="steel", run=run, nodes=nodes, rounds=rounds))
        for name in names:
            write(0, NodeJoined(node=name))
        for round_ in range(1, rounds + 1):
            opened = MINUTE * (round_ - 1)
            is_open = contributed and round_ == rounds
            there = names[:contributed] if is_open else names
            closed = None if is_open else _format(begun + opened + 55)
            fact = (run, round_, *BLOB, b"[]", _format(begun + opened), closed)
            statements.append(("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?)", fact))
            write(opened, RoundOpened(round=round_))
            for number, name in enumerate(there):
                for seconds, event in _contribute(name, number, round_):
                    write(opened + seconds, event)
                    if isinstance(event, Contribution):
                        values = (run, round_, name, event.weight, BLOB.digest, event.bytes)
                        statements.append(
                            ("INSERT INTO contributions VALUES (?, ?, ?, ?, ?, ?)", values)
                        )
            if round_ % 7 == 3:
                write(opened + 52, Late(node=names[-1], round=round_))
                write(opened + 53, NodeLost(node=names[0], round=round_))
                write(opened + 54, NodeJoined(node=names[0]))
            if not is_open:
                size = BLOB.size
                summary = RoundClosed(
                    round=round_,
                    contributors=names,
                    seconds=55,
                    bytes_up=size * nodes,
                    bytes_down=size,
                )
                write(opened + 55, summary)
        journal._write(*statements)
        if not contributed:
            journal.conclude(run, BLOB)
            for name in names:
                journal.finish_node(run, name)
            write(
                MINUTE * rounds,
                FederationFinished(
                    rounds=rounds, bytes_up=0, bytes_down=0, seconds=MINUTE * rounds
                ),
            )
    journal.close()
    return names


def _contribute(name: str, number: int, round_: int) -> Iterator[tuple[float, AnyEvent]]:
    """What a node does in a round, and how many seconds after its opening."""
    settled = 1 - math.exp(-round_ / (4 + number % 7))
    weight = 0.3 + 0.39 * settled + 0.02 * math.sin(round_ * (number + 1))
    yield 0, Activity(node=name, round=round_, what="training")
    yield 30 + 10 * math.sin(number), Activity(node=name, round=round_, what="sending")
    yield (
        40 + 10 * math.sin(number),
        Contribution(node=name, round=round_, weight=weight, bytes=BLOB.size),
    )
    yield 40 + 10 * math.sin(number), Activity(node=name, round=round_, what="waiting")
    metrics = {
        "L_D": weight,
        "A_k": 0.5 + 0.3 * settled * math.cos(number),
        "L_C": 2.5 * (1.02 - settled),
    }
    yield (
        50,
        Measured(node=name, round=round_, metrics=metrics | {"accuracy": 0.5 + 0.45 * settled}),
    )


def _format(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
