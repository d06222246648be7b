"""Re-weighting of probabilities, the settings of it, and what a line makes of them."""

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from broker_config.protocol.errors import UsageError
from edge.daemon.line_settings import load_verdict_settings, parse
from edge.inference.class_prior import Prior, is_taught, reweight
from edge.inference.outcomes import Verdict
from edge.inference.pipeline import Frame, Inspection, NullConsumer, Pipeline
from edge.inference.served_model import Model, load_model
from edge.inference.tiling import View
from edge.registry.pre_rollout_checks import Sample
from tests.support.tiny_bundle import tiny_bundle

CLASSES = ("red", "green", "blue")
AMOUNTS = arrays(np.float64, (3, 4), elements=st.floats(0, 1)).filter(
    lambda rows: (rows.sum(1) > 0).all()
)
ROWS = AMOUNTS.map(lambda rows: np.float32(rows / rows.sum(1, keepdims=True)))
WEIGHTS = arrays(np.float64, 4, elements=st.floats(1e-6, 1e6))


# ---------------------------------------------------------------- the rule


def test_probabilities_are_multiplied_and_divided_by_their_sum():
    found = reweight(np.float32([[0.5, 0.4, 0.1]]), np.array([1, 0.5, 2]))
    assert found == pytest.approx(np.array([[5 / 9, 2 / 9, 2 / 9]]))


def test_where_all_weights_are_1_the_graphs_own_probabilities_come_back_untouched():
    # no sum of exactly 1, which dividing by it would change
    rows = np.float32([[0.1, 0.2, 0.7000001]])
    assert reweight(rows, np.ones(3)) is rows


@given(ROWS, WEIGHTS)
@example(np.full((3, 4), 0.25, np.float32), np.ones(4))
def test_what_comes_out_are_finite_probabilities_that_sum_to_1(rows, weights):
    found = reweight(rows, weights)
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert found.sum(1) == pytest.approx(1, abs=1e-6)


def test_the_smallest_and_largest_numbers_stay_finite():
    tiny = np.finfo(np.float32).smallest_subnormal
    rows = np.float32([[1, 0, 0], [1, tiny, tiny], [tiny, tiny, tiny], [0, tiny, 0]])
    for weights in itertools.product((1e-6, 1e6), repeat=3):
        found = reweight(rows, np.array(weights))
        assert np.isfinite(found).all()
        assert found.sum(1) == pytest.approx(1, abs=1e-6)


@given(ROWS, WEIGHTS, st.integers(0, 3), st.floats(1, 100))
def test_more_weight_for_a_class_never_makes_it_less_likely_nor_another_more(
    rows, weights, label, factor
):
    heavier = weights.copy()
    heavier[label] *= factor
    change = reweight(rows, heavier).astype(np.float64) - reweight(rows, weights)
    assert (change[:, label] >= -1e-6).all()
    assert (np.delete(change, label, 1) <= 1e-6).all()


# ---------------------------------------------------------------- which weight a class has


def test_a_class_that_this_plant_never_taught_has_their_common_weight_unless_it_has_its_own():
    prior = Prior(untaught=0.1, classes={"green": 0.5, "red": 3, "of another model": 7})
    assert prior.weights(CLASSES, ["red"]).tolist() == [3, 0.5, 0.1]
    assert Prior().weights(CLASSES, CLASSES).tolist() == [1, 1, 1]


def test_a_bundle_that_does_not_say_what_trained_it_has_no_class_that_was_never_taught():
    assert Prior(untaught=0.1).weights(CLASSES, {}).tolist() == [1, 1, 1]
    assert [is_taught("red", trained) for trained in ({}, {"red": 2}, {"blue": 2})] == [
        True,
        True,
        False,
    ]


# ---------------------------------------------------------------- settings


def test_the_table_of_a_lines_file_sets_it(tmp_path: Path):
    (tmp_path / "line.toml").write_text(
        "port = 0\n[view]\ntile = 8\n[prior]\nuntaught = 0.05\n[prior.classes]\nred = "
        '3\n[[sinks]]\nkind = "unread"\n'
    )
    found = load_verdict_settings(tmp_path / "line.toml")
    assert (found.prior, found.view) == (Prior(untaught=0.05, classes={"red": 3}), View(tile=8))


def test_options_add_to_the_file_and_beat_it():
    prior = Prior(untaught=0.5, classes={"red": 3, "blue": 2})
    assert prior.override({}) == prior
    found = prior.override({"untaught": "0.05", "red": "1e-3", "green": "4"})
    assert found == Prior(untaught=0.05, classes={"red": 0.001, "blue": 2, "green": 4})


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "1e7", "1e-7", "half", ""])
def test_a_weight_that_is_none_is_refused(weight: str):
    with pytest.raises(UsageError, match=r"--prior: .*classes"):
        Prior().override({"red": weight})


@pytest.mark.parametrize(
    "table", [{"untaught": 0}, {"untaught": 1.5}, {"classes": {"red": 0.0}}, {"others": 1}, [1]]
)
def test_a_table_that_does_not_fit_is_named_with_its_key(table: object):
    with pytest.raises(UsageError, match=r"line.toml: .*prior"):
        parse({"prior": table}, Path("line.toml"))


def test_a_class_that_the_model_does_not_have_is_named_with_the_one_that_may_be_meant():
    Prior(classes={"red": 2}).check_classes(CLASSES)
    with pytest.raises(UsageError, match=r"'gren'.*red, green, blue") as caught:
        Prior(classes={"red": 2, "gren": 2}).check_classes(CLASSES)
    assert "did you mean 'green'?" in caught.value.remedy


# ---------------------------------------------------------------- a line

RED_AND_BLUE = {"red": 4, "blue": 4}
GREENISH = np.full((16, 16, 3), (100, 130, 0), np.uint8)  # green is 3.2 times as likely as red
GREEN = np.full((16, 16, 3), (0, 255, 0), np.uint8)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Mapping[str, Model]:
    folder = tmp_path_factory.mktemp("prior")
    return {
        "old": load_model(tiny_bundle(folder / "old").folder),
        "new": load_model(tiny_bundle(folder / "new", trained=RED_AND_BLUE).folder),
    }


def inspect(
    model: Model, pixels: np.ndarray, prior: Prior | None = None, view: View | None = None
) -> Inspection:
    with contextlib.closing(Pipeline(model, NullConsumer(), view, prior=prior)) as line:
        found = line.inspect_sync(Frame("part", pixels))
    assert isinstance(found, Inspection)
    return found


def verdict(*arguments: object) -> Verdict:
    return inspect(*arguments).verdict  # type: ignore[arg-type]


def test_a_verdict_is_reached_under_the_prior_and_its_probabilities_are_those(models):
    found = verdict(models["new"], GREENISH)
    assert (found.label, found.taught) == ("red", True)
    assert found.confidence == found.probabilities["red"] == max(found.probabilities.values())
    assert sum(found.probabilities.values()) == pytest.approx(1, abs=1e-6)
    assert found.probabilities["green"] / found.probabilities["red"] == pytest.approx(
        3.24 * 0.2, rel=0.01
    )
    even = verdict(models["new"], GREENISH, Prior(untaught=1))
    assert (even.label, even.taught) == ("green", False)
    assert even.probabilities == verdict(models["old"], GREENISH).probabilities


def test_a_class_that_arrives_gets_its_label_and_the_verdict_is_marked(models):
    found = verdict(models["new"], GREEN)
    assert (found.label, found.taught, found.defect) == ("green", False, True)
    assert verdict(models["old"], GREEN).taught, "a bundle that does not say marks nothing"


def test_the_deciding_tile_is_found_under_the_prior(models):
    frame = np.concatenate([np.full((16, 16, 3), (90, 70, 0), np.uint8), GREENISH], 1)
    view = View(tile=16, overlap=0, no_defect="red")
    assert verdict(models["old"], frame, None, view).label == "green"
    assert not verdict(models["new"], frame, None, view).defect


def test_what_a_gate_compares_are_the_graphs_labels_without_the_prior(models):
    found, sample = inspect(models["new"], GREENISH), Sample()
    sample.add(found)
    assert found.verdict.label == "red"
    assert [each.label for each in sample.inputs_of(found.model)] == ["green"]


def test_a_line_refuses_a_weight_for_a_class_that_its_model_lacks(models):
    with pytest.raises(UsageError, match=r"'rust'.*red, green, blue"):
        Pipeline(models["new"], NullConsumer(), prior=Prior(classes={"rust": 2}))
