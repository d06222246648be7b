"""What travels in which round of a federation."""

import hashlib

import pytest

from broker_config.protocol.messages import Preprocessing, Spec, TensorSpec, Training
from broker_config.protocol.round_contents import (
    basis,
    broadcast_tensors,
    contribution_tensors,
    is_statistics_round,
)

MODEL = {
    "encoder.weight": TensorSpec((2,), 40),
    "encoder2.weight": TensorSpec((2,), 40),
    "classifier": TensorSpec((), 40),
    "bank": TensorSpec((4,), 40),
}
PATCHES = {"patches": TensorSpec((3,), 0)}
SUMS = {"statistics.counts": TensorSpec((2,), 0, "int64")}


def federation(**fields: object) -> Spec:
    return Spec(
        **{  # type: ignore[arg-type]  # one call for all tests
            "federation": "f",
            "run": "0" * 16,
            "software": "",
            "method": "m",
            "options": {},
            "model": "small",
            "classes": ("a", "b"),
            "preprocessing": Preprocessing(size=32),
            "training": Training(),
            "rounds": 3,
            "nodes": 2,
            "quorum": 2,
            "seed": 0,
            "tensors": MODEL,
            "sends": ("encoder", "classifier"),
            "relays": PATCHES,
            "statistics": SUMS,
            **fields,
        }
    )


@pytest.mark.parametrize("round_", [1, 2])
def test_a_training_round_holds_what_is_sent_and_relayed(round_: int) -> None:
    assert contribution_tensors(federation(), round_).keys() == {
        "encoder.weight",
        "classifier",
        "patches",
    }
    assert not is_statistics_round(federation(), round_)


def test_the_last_round_holds_the_statistics_alone() -> None:
    assert contribution_tensors(federation(), 3) == SUMS
    assert is_statistics_round(federation(), 3)


def test_without_statistics_the_last_round_is_as_the_others() -> None:
    plain = federation(statistics={})
    assert contribution_tensors(plain, 3) == contribution_tensors(plain, 1)
    assert broadcast_tensors(plain, 4) == MODEL


def test_only_the_result_holds_the_totals() -> None:
    assert [broadcast_tensors(federation(), round_) for round_ in (1, 2, 3)] == [MODEL] * 3
    assert broadcast_tensors(federation(), 4) == MODEL | SUMS


def test_the_basis_tells_encoders_and_preprocessings_apart() -> None:
    digest = "5" * 64
    written = digest.encode() + b'{"size":32,"mean":[0.485,0.456,0.406],"std":[0.229,0.224,0.225]}'
    assert basis(federation(), digest) == hashlib.sha256(written).hexdigest()
    assert basis(federation(preprocessing=Preprocessing(size=64)), digest) != basis(
        federation(), digest
    )
    assert basis(federation(), "6" * 64) != basis(federation(), digest)
