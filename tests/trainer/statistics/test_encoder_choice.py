"""The encoder and the size that suit all plants best, from what they tell the coordinator."""

import math
import re
from pathlib import Path

import pytest

from tests.support.plants import draw
from trainer import progress
from trainer.data.partition import Scheme
from trainer.federation import simulation
from trainer.federation.server.spec import Request
from trainer.models.catalogue import CANDIDATE_SIZES, CANDIDATES, MILLISECONDS, SHIPPED
from trainer.statistics.encoder_choice import (
    AUTO,
    FILE,
    Cost,
    EncoderLosses,
    choose,
    describe,
    end,
    to_metrics,
    write_down,
)

WEIGHTS = {"small": "none", "efficientnet_lite0": "imagenet"}
FIRST, SECOND = "1" * 16, "2" * 16


def tell(
    folder: Path, run: str, *told: tuple[str, dict[str, float], int], size: int = 96
) -> list[progress.AnyEvent]:
    """A choosing run; returns what is shown of it."""
    seen: list[progress.AnyEvent] = []
    report = write_down(seen.append, folder, WEIGHTS, 6, size)
    report(progress.Gathering(federation="steel", run=run, nodes=2, rounds=1))
    for node, losses, images in told:
        report(progress.Measured(node=node, round=1, metrics=to_metrics(losses, images)))
    return seen


def costs(folder: Path, *sizes: int) -> dict[tuple[str, int], float]:
    """What was told, by model and size."""
    found = EncoderLosses.load(folder).costs(sizes or (96,))
    return {(each.model, each.size): each.loss for each in found}


def test_the_encoder_that_costs_all_images_together_least_is_chosen(tmp_path: Path) -> None:
    """Plant a has three times the images of b: 3 + 9 against 6 + 2,
    though two plants of two prefer neither.
    """
    a, b = {"small": 3.0, "efficientnet_lite0": 6.0}, {"small": 9.0, "efficientnet_lite0": 2.0}
    seen = tell(tmp_path, FIRST, ("a", a, 30), ("b", b, 10))
    assert costs(tmp_path) == {}, "nodes may have yet to tell"
    end(tmp_path, FIRST)
    assert costs(tmp_path) == {("small", 96): 0.3, ("efficientnet_lite0", 96): 0.2}
    chosen = choose(EncoderLosses.load(tmp_path).costs([96]))
    assert chosen == ("efficientnet_lite0", "imagenet", 96, 0.2)
    assert [type(each) for each in seen] == [progress.Gathering, progress.Note, progress.Note]


def test_sizes_are_compared_by_the_plants_that_have_told_of_all(tmp_path: Path) -> None:
    a = {"small": 3.0, "efficientnet_lite0": 6.0}
    tell(tmp_path, FIRST, ("a", a, 10), ("b", {"small": 0.0, "efficientnet_lite0": 0.0}, 10))
    end(tmp_path, FIRST)
    tell(tmp_path, SECOND, ("a", {"small": 4.0, "efficientnet_lite0": 2.0}, 10), size=128)
    assert EncoderLosses.load(tmp_path).left([96, 128]) == [128]
    end(tmp_path, SECOND)
    assert costs(tmp_path, 96, 128) == {
        ("small", 96): 0.3,
        ("efficientnet_lite0", 96): 0.6,
        ("small", 128): 0.4,
        ("efficientnet_lite0", 128): 0.2,
    }
    assert choose(EncoderLosses.load(tmp_path).costs([96, 128]))[::2] == ("efficientnet_lite0", 128)
    assert choose(EncoderLosses.load(tmp_path).costs([96])).size == 96
    assert EncoderLosses.load(tmp_path).left([96, 128]) == []


def test_of_equals_the_first_is_chosen() -> None:
    first, second = Cost("small", "none", 96, 0.5), Cost("small", "none", 128, 0.5)
    assert choose([first, second]) == first


def test_people_see_each_candidate_its_time_and_which_was_taken() -> None:
    known = [Cost(model, "imagenet", size, 0.25) for model, size in MILLISECONDS]
    lines = describe([*known, Cost("small", "none", 32, 0.125)], known[1])
    assert len(lines) == len(MILLISECONDS) + 1
    for (model, size), line in zip(MILLISECONDS, lines, strict=False):
        assert f"{model} at {size} px" in line
        assert "0.250" in line
        assert f"{MILLISECONDS[model, size]:g} ms" in line
    assert [number for number, line in enumerate(lines) if "chosen" in line] == [1]
    assert " ms " not in lines[-1]


def test_the_time_of_each_candidate_is_known() -> None:
    assert MILLISECONDS.keys() == {
        (model, size) for model in CANDIDATES for size in CANDIDATE_SIZES
    }


def test_a_restarted_coordinator_keeps_what_it_was_told_and_another_run_adds_to_it(
    tmp_path: Path,
) -> None:
    tell(tmp_path, FIRST, ("a", {"small": 1.0, "efficientnet_lite0": 6.0}, 10))
    tell(tmp_path, FIRST, ("b", {"small": 2.0, "efficientnet_lite0": 6.0}, 10))
    tell(tmp_path, FIRST, ("b", {"small": 3.0, "efficientnet_lite0": 6.0}, 10))
    tell(tmp_path, SECOND, size=128)
    end(tmp_path, FIRST)
    assert costs(tmp_path) == {("small", 96): 0.2, ("efficientnet_lite0", 96): 0.6}
    known = EncoderLosses.load(tmp_path)
    assert [(each.run, each.ended) for each in known.runs] == [(SECOND, False), (FIRST, True)]


def test_without_an_image_to_leave_out_nothing_is_compared(tmp_path: Path) -> None:
    tell(tmp_path, FIRST, ("a", {"small": 0.0, "efficientnet_lite0": 0.0}, 0))
    end(tmp_path, FIRST)
    assert set(EncoderLosses.load(tmp_path).runs[0].nodes) == {"a"}
    assert costs(tmp_path) == {}


def test_ordinary_telemetry_is_not_taken_for_losses(tmp_path: Path) -> None:
    report = write_down(progress.ignore, tmp_path, WEIGHTS, 6, 64)
    report(progress.Measured(node="a", round=1, metrics={"accuracy": 0.9}))
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("losses", "images"),
    [
        ({"small": -1e29, "efficientnet_lite0": 1.0}, 10),
        ({"small": math.nan, "efficientnet_lite0": 1.0}, 10),
        ({"small": 1.0}, 10),
        ({"small": 1.0, "efficientnet_lite0": 1.0, "\x1b[31mnonesuch": 0.0}, 10),
        ({"small": 1.0, "efficientnet_lite0": 1.0}, -30),
        ({"small": 1.0, "efficientnet_lite0": 1.0}, 4097),
    ],
)
def test_what_no_honest_node_says_does_not_count_and_it_is_named(
    tmp_path: Path, losses: dict[str, float], images: int
) -> None:
    honest = {"small": 3.0, "efficientnet_lite0": 6.0}
    seen = tell(tmp_path, FIRST, ("liar", losses, images), ("a", honest, 10))
    assert set(EncoderLosses.load(tmp_path).runs[0].nodes) == {"a"}
    about = [each.text for each in seen if isinstance(each, progress.Note)]
    assert [("liar" in text, "does not count" in text) for text in about] == [
        (True, True),
        (False, False),
    ]


def test_no_plant_can_make_an_encoder_worse_than_a_guess(tmp_path: Path) -> None:
    tell(tmp_path, FIRST, ("liar", {"small": 1e20, "efficientnet_lite0": 0.0}, 10))
    end(tmp_path, FIRST)
    assert costs(tmp_path) == pytest.approx(
        {("efficientnet_lite0", 96): 0.0, ("small", 96): math.log(6)}
    )


@pytest.mark.parametrize(
    "content", [None, b"{", b'{"run": "1", "weights": {}, "nodes": {}, "size": 96}']
)
def test_without_a_file_or_with_one_of_an_earlier_version_nothing_was_told(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    assert EncoderLosses.load(tmp_path).runs == []


@pytest.mark.slow
def test_a_simulation_takes_the_encoder_that_costs_its_images_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # or else it looks for a connection
    monkeypatch.setattr(simulation, "choose_weights", lambda model: SHIPPED[model].weights)
    images = draw(tmp_path / "images", 6, 1)
    scheme = Scheme("iid", 2, 4, 1, pool="all", test_samples=3)
    training = {"local_epochs": 1, "batch_size": 8}  # of training alone, for comparison
    request = Request("gaussian", weights=AUTO, training=training)
    monkeypatch.setattr(simulation, "wanted_sizes", lambda size: (32, 48))
    seen: list[progress.AnyEvent] = []
    found = simulation.simulate_folder(request, [images], {}, scheme, tmp_path / "out", seen.append)
    said = [each.text for each in seen if isinstance(each, progress.Note)]
    costs = {
        (model, int(size)): float(cost)
        for line in said
        for model, size, cost in re.findall(r"(\w+) at (\d+) px: \D+(\d+\.\d+)", line)
    }
    assert costs.keys() == {(model, size) for model in CANDIDATES for size in (32, 48)}
    assert (found.model, found.size) == min(costs, key=costs.__getitem__)
    assert found.weights == SHIPPED[found.model].weights
