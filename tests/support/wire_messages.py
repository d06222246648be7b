"""Examples of all messages of the federation's protocol."""

from datetime import UTC, datetime

import msgspec

from broker_config.protocol import messages
from broker_config.protocol.messages import TensorSpec

RUN, SESSION, DIGEST = "0123456789abcdef", "fedcba9876543210", "ab" * 32
MANIFEST = messages.Manifest(
    federation="plant-7",
    run=RUN,
    round=3,
    node="line.a",
    digest=DIGEST,
    size=9_000_000,
    chunk_size=262_144,
)
KEYS = messages.PublicKeys(
    agreement="1a" * 32, cipher="2b" * 32, commitment="3c" * 32, signature="4d" * 64
)
CASES = [
    messages.Spec(
        federation="plant-7",
        run=RUN,
        software="0.1.0",
        method="afedcl",
        options={"lambda": 0.1, "epochs": 3, "freeze": True, "start": "global"},
        model="mobilenet_v2",
        classes=("crazing", "Kratzer ä"),
        preprocessing=messages.Preprocessing(size=96),
        training=messages.Training(),
        rounds=30,
        nodes=5,
        quorum=4,
        seed=2**63 - 1,
        tensors={"conv.weight": TensorSpec((8, 3, 3, 3), -20), "bn.mean": TensorSpec((), 4)},
        sends=("encoder",),
    ),
    messages.RoundState(run=RUN, round=3, status="open", broadcast=MANIFEST),
    messages.Presence(session=SESSION, online=False),
    messages.Hello(session=SESSION, run=RUN, software="0.1.0"),
    messages.Contribution(
        session=SESSION, run=RUN, round=3, weight=0.6931471805599453, blob=MANIFEST
    ),
    messages.Telemetry(session=SESSION, run=RUN, round=3, metrics={"accuracy": 0.5, "A_k": 1e-9}),
    messages.Finished(session=SESSION, run=RUN),
    messages.Welcome(session=SESSION),
    messages.Accepted(session=SESSION, run=RUN, round=3),
    messages.Refusal(session=SESSION, reason="unknown class 'rust'", remedy="rename the folder"),
    messages.Want(digest=DIGEST, chunk_size=262_144, chunks=(0, 7, 35)),
    messages.Overview(
        run=RUN,
        time=datetime(2026, 3, 1, 9, 30, tzinfo=UTC),
        round=3,
        rounds=30,
        status="open",
        contributions=1,
        quorum=4,
        left=12.5,
        nodes=(
            messages.NodeState(
                node="line.a",
                doing="sending",
                awaited=True,
                done=40,
                total=100,
                error="Zeit überschritten",
            ),
            messages.NodeState(
                node="b", doing="waiting", round=3, weight=0.5, bytes=9_000_000, heard=0.0
            ),
        ),
        more=2,
    ),
    messages.MaskingStep(
        run=RUN,
        round=3,
        members={"line.a": KEYS},
        shares={"b": "5a" * 82},
        survivors=("b", "line.a"),
        signatures={"b": "c3" * 64},
    ),
    messages.MaskingAnswer(
        session=SESSION,
        run=RUN,
        round=3,
        keys=KEYS,
        shares={"b": "5a" * 82},
        signature="c3" * 64,
        revealed={"b": "0f" * 33},
    ),
]
SPEC = msgspec.structs.replace(CASES[0], nodes=3, quorum=2, rounds=5)
