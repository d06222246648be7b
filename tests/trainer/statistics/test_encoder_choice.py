"""The encoder that suits all plants best, from what they tell the coordinator."""

import math
import re
from pathlib import Path

import pytest

from broker_config.protocol.errors import UsageError
from tests.support.plants import draw
from trainer import progress
from trainer.data.partition import Scheme
from trainer.federation import simulation
from trainer.federation.server.spec import Request
from trainer.models.catalogue import CANDIDATES, SHIPPED
from trainer.statistics.encoder_choice import (
    AUTO,
    FILE,
    EncoderLosses,
    choose,
    to_metrics,
    write_down,
)

MODELS = ("small", "efficientnet_lite0")


def tell(
    folder: Path, run: str, *told: tuple[str, dict[str, float], int]
) -> list[progress.AnyEvent]:
    """A run's events pass through to those who watch."""
    seen: list[progress.AnyEvent] = []
    report = write_down(seen.append, folder, {"small": "mine.safetensors"}, MODELS, 6, 96)
    report(progress.Gathering(federation="steel", run=run, nodes=2, rounds=1))
    for node, losses, images in told:
        report(progress.Measured(node=node, round=1, metrics=to_metrics(losses, images)))
    return seen


def test_the_encoder_that_costs_all_images_together_least_is_chosen(tmp_path: Path) -> None:
    """Plant a has three times the images of b: 3 + 9 against 6 + 2,
    though two plants of two prefer neither.
    """
    a, b = {"small": 3.0, "efficientnet_lite0": 6.0}, {"small": 9.0, "efficientnet_lite0": 2.0}
    seen = tell(tmp_path, "1" * 16, ("a", a, 30), ("b", b, 10))
    told = EncoderLosses.load(tmp_path)
    assert told is not None
    assert told.costs() == {"efficientnet_lite0": 0.2, "small": 0.3}
    assert list(told.costs()) == ["efficientnet_lite0", "small"]
    assert choose(tmp_path) == ("efficientnet_lite0", "imagenet", 96)
    assert len(seen) == 3, "whoever watches hears everything"


def test_the_federations_own_encoder_is_chosen_with_the_weights_that_it_began_with(
    tmp_path: Path,
) -> None:
    tell(tmp_path, "1" * 16, ("a", {"small": 1.0, "efficientnet_lite0": 6.0}, 30))
    assert choose(tmp_path) == ("small", "mine.safetensors", 96)


def test_a_restarted_coordinator_keeps_what_it_was_told_and_a_new_run_forgets_it(
    tmp_path: Path,
) -> None:
    tell(tmp_path, "1" * 16, ("a", {"small": 1.0, "efficientnet_lite0": 6.0}, 10))
    tell(tmp_path, "1" * 16, ("b", {"small": 2.0, "efficientnet_lite0": 6.0}, 10))
    told = EncoderLosses.load(tmp_path)
    assert told is not None
    assert set(told.nodes) == {"a", "b"}
    tell(tmp_path, "2" * 16, ("b", {"small": 4.0, "efficientnet_lite0": 6.0}, 10))
    told = EncoderLosses.load(tmp_path)
    assert told is not None
    assert told.costs() == {"small": 0.4, "efficientnet_lite0": 0.6}


def test_a_run_that_compares_nothing_leaves_what_plants_said_before(tmp_path: Path) -> None:
    tell(tmp_path, "1" * 16, ("a", {"small": 1.0, "efficientnet_lite0": 6.0}, 10))
    later = write_down(progress.ignore, tmp_path, {"small": "none"}, ("small",), 6, 64)
    later(progress.Gathering(federation="steel", run="2" * 16, nodes=2, rounds=1))
    later(progress.Measured(node="newcomer", round=1, metrics=to_metrics({"small": 0.0}, 2)))
    told = EncoderLosses.load(tmp_path)
    assert told is not None
    assert (told.run, set(told.nodes)) == ("1" * 16, {"a"})


def test_ordinary_telemetry_is_not_taken_for_a_preview(tmp_path: Path) -> None:
    report = write_down(progress.ignore, tmp_path, {"small": "none"}, MODELS, 6, 64)
    report(progress.Measured(node="a", round=1, metrics={"accuracy": 0.9}))
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("losses", "images"),
    [
        ({"small": -1e29, "efficientnet_lite0": 1.0}, 10),
        ({"small": math.nan, "efficientnet_lite0": 1.0}, 10),
        ({"small": 1.0}, 10),
        ({"small": 1.0, "efficientnet_lite0": 1.0, "\x1b[31mnonesuch": 0.0}, 10),
        ({"small": 1.0, "efficientnet_lite0": 1.0}, 0),
        ({"small": 1.0, "efficientnet_lite0": 1.0}, -30),
        ({"small": 1.0, "efficientnet_lite0": 1.0}, 4097),
    ],
)
def test_what_no_honest_node_says_does_not_count_and_it_is_named(
    tmp_path: Path, losses: dict[str, float], images: int
) -> None:
    honest = {"small": 3.0, "efficientnet_lite0": 6.0}
    seen = tell(tmp_path, "1" * 16, ("liar", losses, images), ("a", honest, 10))
    told = EncoderLosses.load(tmp_path)
    assert told is not None
    assert set(told.nodes) == {"a"}
    assert next(each.text for each in seen if isinstance(each, progress.Note)).startswith(
        "what liar says of encoders"
    )
    assert choose(tmp_path)[0] == "small"


def test_no_plant_can_make_an_encoder_worse_than_a_guess(tmp_path: Path) -> None:
    tell(tmp_path, "1" * 16, ("liar", {"small": 1e20, "efficientnet_lite0": 0.0}, 10))
    told = EncoderLosses.load(tmp_path)
    assert told is not None
    assert told.costs() == pytest.approx({"efficientnet_lite0": 0.0, "small": math.log(6)})


def test_a_file_that_was_meddled_with_chooses_no_unknown_model(tmp_path: Path) -> None:
    tell(tmp_path, "1" * 16, ("a", {"small": 1.0, "efficientnet_lite0": 6.0}, 30))
    (tmp_path / FILE).write_text(
        (tmp_path / FILE).read_text().replace('"small": 1.0', '"nonesuch": 1.0')
    )
    assert choose(tmp_path)[0] == "efficientnet_lite0"


@pytest.mark.parametrize("content", [None, b"{", b'{"run": "1", "weights": {}, "nodes": {}}'])
def test_without_a_preview_there_is_nothing_to_choose_from(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UsageError, match="no plant") as raised:
        choose(tmp_path)
    assert "edge-node preview" in raised.value.remedy


@pytest.mark.slow
def test_a_simulation_takes_the_encoder_that_costs_its_images_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # or else it looks for a connection
    monkeypatch.setattr(simulation, "choose_weights", lambda model: SHIPPED[model].weights)
    images = draw(tmp_path / "images", 6, 1)
    scheme = Scheme("iid", 2, 4, 1, pool="all", test_samples=3)
    training = {"local_epochs": 1, "batch_size": 8}  # of training alone, for comparison
    request = Request("gaussian", weights=AUTO, size=32, training=training)
    seen: list[progress.AnyEvent] = []
    found = simulation.simulate_folder(request, [images], {}, scheme, tmp_path / "out", seen.append)
    (said,) = [each.text for each in seen if isinstance(each, progress.Note)]
    costs = {model: float(cost) for model, cost in re.findall(r"(\w+) (\d+\.\d+)", said)}
    assert set(costs) == set(CANDIDATES)
    assert found.model == min(costs, key=costs.__getitem__)
    assert found.weights == SHIPPED[found.model].weights
