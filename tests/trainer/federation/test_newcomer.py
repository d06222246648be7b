"""Nodes that come when a federation has finished, over a real broker:
its statistics give them a model at once.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from broker_config.broker.embedded import start_broker
from broker_config.mqtt.endpoint import Endpoint
from broker_config.protocol.errors import EdgeNodeError
from tests.support.plants import CLASSES, draw
from tests.support.threaded_federation import PATIENCE, PLANTS, Federation, Session, same
from trainer import progress
from trainer.federation.client.join import join
from trainer.federation.server.coordinator.process import Outcome
from trainer.federation.server.ledger import Ledger
from trainer.federation.server.spec import Participation
from trainer.statistics.lda_head import expected_scale, fit
from trainer.statistics.sums import Sums
from trainer.training.personal_model import load_metadata, load_predictions


@dataclass
class Finished:
    """A federation of three plants that has finished; the first two classes are in all of them."""

    federation: Federation
    endpoint: Endpoint
    folder: Path
    totals: Sums

    def come(self, name: str, images: Path | None, **options: str) -> tuple[Path, list[str]]:
        """A newcomer's model, and what it was told,
        while the coordinator serves the result again.
        """
        with ThreadPoolExecutor(1) as pool:
            coordinator = self.federation.coordinator(linger=PATIENCE)

            def part(session: Session) -> Path | None:
                return join(
                    self.endpoint,
                    name=name,
                    folder=images,
                    test=None,
                    state=self.folder / options.get("state", name),
                    federation=self.federation.spec.federation,
                    telemetry=False,
                    demands={},
                    wait=2,
                    report=session.report,
                    stop=session.asked,
                )

            node = Session(pool, part)
            try:
                model = node.end()
            finally:
                coordinator.stop()
        told = list(node._events.queue)
        assert isinstance(model, Path)
        return model, [event.text for event in told if isinstance(event, progress.Note)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("finished")
    plants = {name: draw(folder / name, 4, seed) for seed, name in enumerate(PLANTS)}
    with (
        pytest.MonkeyPatch.context() as patch,
        start_broker(folder / "broker", kind="mosquitto") as broker,
    ):
        patch.setattr("trainer.training.alone.ROUNDS", 1)
        endpoint = Endpoint.parse(broker.url)
        federation = Federation(
            endpoint, plants, folder / "run", "steel", 0, Participation(), "gaussian"
        )
        coordinator = federation.coordinator()
        nodes = [federation.node(name) for name in PLANTS]
        outcome = coordinator.end()
        assert isinstance(outcome, Outcome)
        for node in nodes:
            node.end()
        yield Finished(federation, endpoint, folder / "newcomers", Sums.of(outcome.broadcast))


def test_a_newcomer_without_an_image_has_the_others_head_and_nothing_is_claimed_of_it(
    finished: Finished,
) -> None:
    model, told = finished.come("plant-d", None)
    metadata, totals, personal = (
        load_metadata(model),
        finished.totals,
        load_file(model / "personal.safetensors"),
    )
    assert (metadata.metrics, metadata.comparison, metadata.trained) == ({}, None, {})
    assert (metadata.classes, load_predictions(model)) == (CLASSES, ())
    assert any(text.startswith("nothing is known of its accuracy here") for text in told)
    head = fit(totals, totals.without(totals))
    scale = expected_scale(head.spread)
    assert 0 < scale < 1
    np.testing.assert_array_equal(
        personal["classifier.weight"], (scale * head.weight).astype(np.float32)
    )
    np.testing.assert_array_equal(
        personal["classifier.bias"], (scale * head.bias).astype(np.float32)
    )


def test_a_newcomer_takes_no_place_and_nothing_leaves_it(finished: Finished) -> None:
    finished.come("plant-e", draw(finished.folder / "images-e", 1, 9, CLASSES[:1]))
    with Ledger(finished.federation.folder / "coordinator") as ledger:
        assert ledger.run is not None
        assert set(ledger.run.members) == {*PLANTS}
    assert finished.federation.contributors() == [{*PLANTS}]


@pytest.mark.parametrize(("per_class", "known"), [(1, 1), (5, 2)], ids=["one image", "many"])
def test_a_newcomers_images_are_part_of_its_own_model_alone(
    per_class: int, known: int, finished: Finished
) -> None:
    name = f"plant-{per_class}-{known}"
    model, told = finished.come(
        name, draw(finished.folder / f"images-{name}", per_class, 11, CLASSES[:known])
    )
    metadata = load_metadata(model)
    assert metadata.trained == dict.fromkeys(CLASSES[:known], per_class)
    if per_class * known == 1:
        assert metadata.metrics == {}, "nothing else can judge one image"
        assert metadata.comparison is None
    else:
        assert metadata.metrics["images"] == per_class * known
        assert metadata.metrics["cross_validated"] == 1
        assert metadata.comparison is not None
    assert any("its model is made here" in each for each in told)


@pytest.mark.parametrize("restored", [False, True], ids=["a new folder", "a copy from before"])
def test_who_has_lost_what_it_contributed_is_told_that_its_images_would_count_twice(
    restored: bool, finished: Finished
) -> None:
    state = f"lost-{restored}"
    if restored:
        (finished.folder / state).mkdir(parents=True)
        shutil.copy(
            finished.federation.folder / "plant-a" / "identity.json", finished.folder / state
        )
    with pytest.raises(EdgeNodeError, match=r"totals.*'plant-a'") as caught:
        finished.come("plant-a", None, state=state)
    assert "--state" in caught.value.remedy


def test_who_has_lost_its_identity_alone_knows_what_it_contributed(finished: Finished) -> None:
    federation = finished.federation
    before = federation.personal("plant-b")
    for path in (federation.folder / "plant-b").glob("identity*.json"):
        path.unlink()
    shutil.rmtree(federation.folder / "plant-b" / "model")
    coordinator = federation.coordinator(linger=PATIENCE)
    try:
        federation.node("plant-b").end()
    finally:
        coordinator.stop()
    assert same(federation.personal("plant-b"), before)


@pytest.mark.slow
def test_without_its_coordinator_a_finished_federation_is_named_with_how_to_serve_it_again(
    finished: Finished,
) -> None:
    with pytest.raises(EdgeNodeError, match="steel has finished") as told:
        join(
            finished.endpoint,
            name="plant-f",
            folder=None,
            test=None,
            state=finished.folder / "f",
            federation="steel",
            telemetry=False,
            demands={},
            wait=60,
            report=progress.ignore,
        )
    assert "--state" in str(told.value.remedy)
