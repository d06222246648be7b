"""A node's part in a round for statistics.

Rounds of training: tests/trainer/methods/test_method_properties.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from broker_config.protocol.messages import Spec
from tests.support import class_sums
from tests.support.class_sums import COUNTS, GRID
from tests.support.method_cases import CLASSES, equal, images, shares
from trainer.data.class_folders import Images
from trainer.federation.server.spec import Participation, Request, draft
from trainer.federation.simulation import Engine, simulate
from trainer.models.named_tensors import Arrays, select
from trainer.models.network import Network, to_arrays
from trainer.training import alone
from trainer.training.alone import alone_spec
from trainer.training.conclusion import conclude
from trainer.training.participant import Participant, State


@pytest.fixture(autouse=True)
def method(monkeypatch: pytest.MonkeyPatch) -> str:
    return class_sums.register(monkeypatch)


def drafted(*, rounds: int = 0, **participation: int) -> tuple[Spec, Arrays]:
    """With so many rounds of training before the one for statistics."""
    request = Request(
        class_sums.NAME, {"trained": rounds > 0}, "small", "none", 16, {"local_epochs": 1}, rounds
    )
    return draft(
        request,
        federation="test",
        classes=CLASSES,
        nodes=3,
        participation=Participation(**participation),
    )


def test_the_result_holds_the_totals_and_the_last_round_changes_no_model() -> None:
    spec, broadcast = drafted(rounds=2)
    closed: list[Arrays] = []
    result = simulate(
        spec, broadcast, shares(), closed=lambda _, after: closed.append(after)
    ).broadcast
    own = [
        Participant(spec, node, each).contribute(State({}, {}), closed[1], 3)[1]
        for node, each in shares().items()
    ]
    assert len(closed) == 3
    assert {each.weight for each in own} == {1.0}
    assert result[COUNTS].tolist() == [3, 9, 6]
    for name in spec.statistics:
        assert np.array_equal(result.pop(name), sum(each.tensors[name] for each in own))
    assert equal(result, closed[1])
    assert not equal(result, closed[0])


@pytest.mark.parametrize("rounds", [0, 2])
def test_the_batched_engine_computes_the_same_statistics(rounds: int) -> None:
    """To the byte of the same encoder; trained ones agree to rounding."""
    spec, broadcast = drafted(rounds=rounds)
    plain, batched = (
        simulate(spec, broadcast, shares(), engine=Engine(kind)) for kind in ("plain", "batched")
    )
    if rounds == 0:
        assert equal(plain.broadcast, batched.broadcast)
    for name in spec.statistics:
        np.testing.assert_allclose(
            plain.broadcast[name], batched.broadcast[name], atol=rounds * 2**GRID / 1e3
        )


def test_a_node_keeps_its_own_statistics_also_on_disk(tmp_path: Path) -> None:
    spec, broadcast = drafted()
    participant = Participant(spec, "plant-1", shares()["plant-1"])
    state, sent, metrics = participant.contribute(participant.start(broadcast), broadcast, 1)
    state, more = participant.refine(state, broadcast, 1)
    assert (metrics, more) == ({}, {})
    state.save(tmp_path / "state.safetensors")
    kept = State.load(tmp_path / "state.safetensors").tensors
    assert equal({name: kept[name].numpy() for name in spec.statistics}, sent.tensors)


def test_statistics_are_of_all_nodes_though_a_sample_trains() -> None:
    spec, broadcast = drafted(rounds=2, sample=1)
    result = simulate(spec, broadcast, shares())
    assert result.broadcast[COUNTS].sum() == 18
    assert [line["round"] for line in result.models["plant-1"].metadata.history][-1] == 3


def test_nothing_is_measured_in_the_round_for_statistics() -> None:
    spec, broadcast = drafted(rounds=2)
    (model, *_) = simulate(spec, broadcast, shares(), evaluate_every=1).models.values()
    assert [metrics.keys() - {"round"} for metrics in model.metadata.history] == [
        {"L_C", "accuracy", "accuracy_all"}
    ] * 2 + [set()]
    assert 0 <= model.metadata.metrics["accuracy"] <= 1


def test_a_node_that_the_totals_do_not_hold_adds_its_own() -> None:
    """It was away in the last round, or came too late:
    its model is the one that it would have had.
    """
    spec, broadcast = drafted()
    models = simulate(spec, broadcast, shares()).models
    others = {node: each for node, each in shares().items() if node != "plant-2"}
    without = simulate(spec, broadcast, others).broadcast
    participant = Participant(spec, "plant-2", shares()["plant-2"])
    away = participant.start(broadcast)
    late, _, _ = participant.contribute(away, broadcast, 1)
    for state in (away, late):
        model = conclude(participant, state, 1, broadcast, without, (), None, counted=False)
        assert equal(to_arrays(model.tensors), to_arrays(models["plant-2"].tensors))


def test_an_image_is_judged_by_sums_that_do_not_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plant's ten images: each image's model has the other nine, computed here by hand."""
    seen: list[int] = []
    make = class_sums.deploy

    def deploy(
        network: Network,
        own: dict[str, torch.Tensor],
        received: dict[str, torch.Tensor],
        served: bool,
    ) -> dict[str, torch.Tensor]:
        seen.append(int(own[COUNTS].sum()))
        assert not received[COUNTS].any(), "others have none"
        return make(network, own, received, served)

    monkeypatch.setattr(class_sums, "deploy", deploy)
    spec, broadcast = drafted()
    train = images(2, 10)
    participant = Participant(spec, "plant-1", Images(train, None))
    final = simulate(spec, broadcast, {"plant-1": Images(train, None)}).broadcast
    state, _, _ = participant.contribute(participant.start(broadcast), broadcast, 1)
    seen.clear()
    model = conclude(participant, state, 1, broadcast, final, (), None)
    assert seen == [10, *[9] * 10]
    assert model.metadata.metrics["cross_validated"] == 1
    assert model.metadata.metrics["images"] == 10


def test_training_alone_has_the_rounds_of_training() -> None:
    assert alone_spec(drafted(rounds=3)[0]).rounds == 3
    spec = alone_spec(drafted()[0])
    assert (spec.rounds, spec.statistics) == (alone.ROUNDS, {})


def test_the_statistics_of_others_change_a_model() -> None:
    spec, broadcast = drafted()
    changed = {**shares(), "plant-3": Images(images(77), images(177))}
    one, other = (
        to_arrays(simulate(spec, broadcast, each).models["plant-1"].tensors)
        for each in (shares(), changed)
    )
    assert equal(select(one, ("encoder",)), select(other, ("encoder",)))
    assert not equal(one, other)
