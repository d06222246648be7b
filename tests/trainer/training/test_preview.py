"""What joining would give a plant, told before any training."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from broker_config.broker.embedded import EmbeddedBroker
from tests.support.plants import CLASSES, draw, drawn_weights, here, start
from trainer.data.class_folders import Images, LabelledImages
from trainer.federation.server.spec import Request, draft
from trainer.federation.simulation import simulate
from trainer.models.named_tensors import Arrays, select
from trainer.statistics.encoder_choice import EncoderLosses
from trainer.training.participant import Participant
from trainer.training.preview import Preview, compute_loss, cross_entropy, preview


def previewed(plants: dict[str, LabelledImages], node: str, **options: str) -> Preview:
    spec, broadcast = draft(
        Request("gaussian", options, model="small", weights="none", size=32, seed=7),
        federation="steel",
        classes=CLASSES,
        nodes=len(plants),
    )
    images = {name: Images(each, None) for name, each in plants.items()}
    result = simulate(spec, broadcast, images).broadcast
    participant = Participant(spec, node, images[node])
    state, _, _ = participant.contribute(participant.start(broadcast), broadcast, 1)
    return preview(spec, node, participant.without_own(state, result, counted=True), plants[node])


def coloured(labels: list[int], seed: int) -> LabelledImages:
    """An image of each label: red, green or blue under noise."""
    random = np.random.default_rng(seed)
    pixels = random.normal(90, 20, (len(labels), 32, 32, 3))
    for image, label in zip(pixels, labels, strict=True):
        image[..., label] += 100
    names = tuple(f"{seed}-{number}" for number in range(len(labels)))
    return LabelledImages(
        pixels.clip(0, 255).astype(np.uint8), np.array(labels), names, tuple(map(Path, names))
    )


@pytest.fixture
def plants() -> dict[str, LabelledImages]:
    return {
        "plant-1": coloured([0] * 5 + [1] * 5, 1),
        "plant-2": coloured([1] * 5 + [2] * 5, 2),
        "plant-3": coloured([1] * 4 + [2] * 4, 3),
    }


def test_a_plant_is_told_which_classes_come_from_others(plants: dict[str, LabelledImages]) -> None:
    made = previewed(plants, "plant-1")
    assert [(each.name, each.own, each.others, each.plants) for each in made.classes] == [
        ("inclusion", 5, 0, 0),
        ("patches", 5, 9, 2),
        ("scratches", 0, 9, 2),
    ]
    assert any(
        "only other plants" in line and "scratches (9 images at 2" in line
        for line in made.describe()
    )


def test_the_forecast_tells_own_all_and_what_the_plant_reaches_by_itself(
    plants: dict[str, LabelledImages],
) -> None:
    (forecast,) = previewed(plants, "plant-1").forecasts
    assert forecast.model == "small"
    assert forecast.images == 10
    assert forecast.own >= forecast.all > 0.6, "more candidates can only make it harder"
    assert forecast.alone is not None
    assert forecast.loss > 0


def test_encoders_are_compared_on_the_same_images() -> None:
    plants = {"plant-1": coloured([0, 0, 1, 1], 1), "plant-2": coloured([0, 0, 1, 1], 2)}
    made = previewed(plants, "plant-1", others="efficientnet_lite0", dimensions="20")
    assert [each.model for each in made.forecasts] == ["small", "efficientnet_lite0"]
    assert made.metrics().keys() == {
        "leave-one-out loss small",
        "leave-one-out loss efficientnet_lite0",
        "images left out",
    }
    assert made.forecasts[1].own > 0.7


def test_a_plant_with_one_image_a_class_has_no_forecast_of_itself(
    plants: dict[str, LabelledImages],
) -> None:
    plants["plant-1"] = coloured([0, 1], 9)
    (forecast,) = previewed(plants, "plant-1").forecasts
    assert forecast.alone is None


def test_an_image_that_is_the_only_one_of_its_class_is_not_judged(
    plants: dict[str, LabelledImages],
) -> None:
    """Without it nobody would know the class: it could only be wrong."""
    whole = previewed(plants, "plant-1").forecasts[0]
    del plants["plant-2"], plants["plant-3"]
    plants["plant-1"] = coloured([0] * 5 + [1] * 5 + [2], 1)
    made = previewed(plants, "plant-1")
    assert whole.images == made.forecasts[0].images == 10
    assert made.forecasts[0].all == made.forecasts[0].own
    assert not any(doubt.path.endswith("-10") for doubt in made.doubts)


def test_without_an_image_to_judge_there_are_no_figures_and_the_coordinator_is_told_so() -> None:
    made = previewed({f"plant-{label}": coloured([label], label) for label in range(3)}, "plant-0")
    (forecast,) = made.forecasts
    assert (forecast.images, forecast.own, forecast.all, forecast.alone) == (0, None, None, None)
    assert made.metrics() == {"leave-one-out loss small": 0.0, "images left out": 0.0}
    assert made.describe()[0].startswith("no forecast")
    assert not any("%" in line for line in made.describe())


def test_look_alikes_of_which_no_other_image_is_left_are_not_judged(
    plants: dict[str, LabelledImages],
) -> None:
    alike = plants["plant-1"]._replace(groups=np.arange(10) // 5)  # nobody else has the first class
    (forecast,) = previewed({**plants, "plant-1": alike}, "plant-1").forecasts
    assert forecast.images == 5
    assert forecast.alone is None


def test_an_image_in_the_wrong_folder_is_named_with_what_it_looks_like(
    plants: dict[str, LabelledImages],
) -> None:
    first = plants["plant-2"]
    labels = first.labels.copy()
    wrong = int(np.flatnonzero(labels == 2)[0])
    labels[wrong] = 1
    plants["plant-2"] = first._replace(labels=labels)
    doubts = {doubt.path: doubt for doubt in previewed(plants, "plant-2").doubts}
    assert doubts[str(first.paths[wrong])].label == "patches"
    assert doubts[str(first.paths[wrong])].looks_like == "scratches"
    assert len(doubts) <= 2


def test_look_alikes_are_left_out_together(plants: dict[str, LabelledImages]) -> None:
    """An image's copy under another label would speak against it, were it not left out with it."""
    first = plants["plant-1"]
    alike = first._replace(groups=np.arange(10) // 5)
    by_itself, in_groups = (
        previewed({**plants, "plant-1": each}, "plant-1") for each in (first, alike)
    )
    assert by_itself.forecasts[0].loss != in_groups.forecasts[0].loss


def test_cross_entropy_is_that_of_the_best_scale() -> None:
    logits, labels = (
        np.array([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 2.0]]),
        np.array([0, 1, 0, 0]),
    )
    assert cross_entropy(logits, labels) == pytest.approx(
        cross_entropy(logits * 7, labels), rel=1e-2
    )
    assert cross_entropy(logits, labels) < 4 * np.log(2)


def test_the_better_encoder_costs_less(plants: dict[str, LabelledImages]) -> None:
    """The same encoder, and one whose features are noise."""
    spec, broadcast = draft(
        Request("gaussian", model="small", weights="none", size=32, seed=7),
        federation="f",
        classes=CLASSES,
        nodes=3,
    )
    random = np.random.default_rng(0)
    blind: Arrays = {
        name: random.permutation(value.ravel()).reshape(value.shape) * 0
        if name.endswith("weight")
        else value
        for name, value in select(broadcast, ("encoder",)).items()
    }
    assert compute_loss(spec, broadcast, plants) < compute_loss(spec, blind, plants)


@pytest.mark.slow
def test_plants_hear_it_over_a_broker_and_the_coordinator_hears_sums_alone(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    folders = {
        "plant-1": draw(tmp_path / "images-1", 4, 1, CLASSES[:2]),
        "plant-2": draw(tmp_path / "images-2", 4, 2, CLASSES[1:]),
    }
    processes = [
        start(
            "coordinate",
            mosquitto.url,
            "--classes",
            ",".join(CLASSES),
            "--nodes",
            2,
            "--method",
            "gaussian",
            "--option",
            "others=efficientnet_lite0",
            "--model",
            "small",
            "--weights",
            drawn_weights(),
            "--size",
            32,
            "--state",
            tmp_path / "coordinator",
            log=tmp_path / "coordinator.log",
        )
    ]
    processes += [
        start(
            "preview",
            mosquitto.url,
            "--name",
            name,
            "--data",
            folder,
            "--state",
            tmp_path / name,
            log=tmp_path / f"{name}.log",
        )
        for name, folder in folders.items()
    ]
    try:
        codes = [process.wait(100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert codes == [0, 0, 0], logs
    for name in folders:
        made = msgspec.json.decode((tmp_path / name / "preview.json").read_bytes(), type=Preview)
        assert [each.model for each in made.forecasts] == ["small", "efficientnet_lite0"]
        assert not (tmp_path / name / "model").exists(), "a preview trains nothing"
        assert not list((tmp_path / name).glob("alone*"))
    assert EncoderLosses.load(tmp_path / "coordinator").runs == []
    assert "leave-one-out" not in (tmp_path / "coordinator.log").read_text()


def test_a_preview_sends_no_sums_that_would_tell_more_than_the_plant_demands(
    mosquitto: EmbeddedBroker, tmp_path: Path
) -> None:
    coordinator = start(
        "coordinate",
        mosquitto.url,
        "--classes",
        ",".join(CLASSES),
        "--nodes",
        2,
        "--method",
        "gaussian",
        "--model",
        "small",
        "--weights",
        drawn_weights(),
        "--size",
        32,
        "--state",
        tmp_path / "coordinator",
        log=tmp_path / "coordinator.log",
    )
    try:
        done = here(
            "preview",
            mosquitto.url,
            "--name",
            "a",
            "--data",
            draw(tmp_path / "images", 3, 1),
            "--state",
            tmp_path / "a",
            "--demand",
            "images=4",
        )
    finally:
        coordinator.kill()
        coordinator.wait(60)
    assert done.returncode == 2
    assert "than it demands" in done.stderr
    assert not (tmp_path / "a").exists()


def test_a_federation_that_trains_has_no_preview(mosquitto: EmbeddedBroker, tmp_path: Path) -> None:
    coordinator = start(
        "coordinate",
        mosquitto.url,
        "--classes",
        ",".join(CLASSES),
        "--nodes",
        2,
        "--method",
        "fedavg",
        "--model",
        "small",
        "--weights",
        drawn_weights(),
        "--size",
        32,
        "--state",
        tmp_path / "coordinator",
        log=tmp_path / "coordinator.log",
    )
    try:
        done = here(
            "preview",
            mosquitto.url,
            "--name",
            "a",
            "--data",
            draw(tmp_path / "images", 3, 1),
            "--state",
            tmp_path / "a",
        )
    finally:
        coordinator.kill()
        coordinator.wait(60)
    assert done.returncode != 0
    assert "before training" in done.stderr
