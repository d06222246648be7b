"""When the head predicts a product: as its embeddings arrive, in whatever order, from whomever."""

import numpy as np
import pytest

from edge_node.extensions.vfl.line.party_bundle import EmbeddingSource
from edge_node.extensions.vfl.line.product_embeddings import (
    DuePrediction,
    EmbeddingCollector,
    SensorEmbedding,
)

SENSORS = (
    EmbeddingSource(name="a", size=2),
    EmbeddingSource(name="b", size=3),
    EmbeddingSource(name="c", size=1),
)
SIZES = {each.name: each.size for each in SENSORS}


def part(sensor: str, at: float = 0.0, round_: int = 7) -> SensorEmbedding:
    return SensorEmbedding(np.ones(SIZES[sensor], np.float32), round_, at)


def seen(due: list[DuePrediction]) -> list[tuple[str, str, str]]:
    """Product, kind of answer, and the sensors that have reported."""
    return [(each.product, each.answer, "".join(sorted(each.parts))) for each in due]


@pytest.fixture
def collector() -> EmbeddingCollector:
    return EmbeddingCollector(SENSORS, deadline=1.0, most=9)


def test_each_embedding_brings_a_partial_prediction_and_the_last_one_the_final(
    collector: EmbeddingCollector,
) -> None:
    answers = []
    for sensor in "cab":
        assert collector.add(sensor, "p", part(sensor)) is None
        answers += seen(collector.take_due(0.0))
    assert answers == [("p", "partial", "c"), ("p", "partial", "ac"), ("p", "final", "abc")]
    assert collector.take_due(5.0) == []
    assert collector.next_deadline() is None


def test_what_arrives_together_is_answered_once(collector: EmbeddingCollector) -> None:
    for product in ("p", "q"):
        collector.add("a", product, part("a"))
        collector.add("b", product, part("b"))
    collector.add("c", "q", part("c"))
    assert seen(collector.take_due(0.0)) == [("q", "final", "abc"), ("p", "partial", "ab")]
    assert collector.take_due(0.5) == []


def test_after_the_deadline_a_product_has_its_final_answer_from_what_is_there(
    collector: EmbeddingCollector,
) -> None:
    collector.add("a", "p", part("a", at=10.0))
    collector.take_due(10.0)
    collector.add("b", "p", part("b", at=10.9))
    assert collector.next_deadline() == pytest.approx(11.0)  # counted from the first embedding
    assert seen(collector.take_due(10.99)) == [("p", "partial", "ab")]
    assert seen(collector.take_due(11.0)) == [("p", "final", "ab")]
    assert collector.add("c", "p", part("c", at=11.1)) == "late"
    assert collector.add("a", "p", part("a", at=11.1)) == "there already"
    assert collector.take_due(20.0) == []


def test_a_second_embedding_of_a_sensor_changes_nothing(collector: EmbeddingCollector) -> None:
    first = part("a")
    collector.add("a", "p", first)
    assert (
        collector.add("a", "p", SensorEmbedding(np.zeros(2, np.float32), 8, 0.1)) == "there already"
    )
    assert collector.take_due(0.1)[0].parts["a"] is first


@pytest.mark.parametrize(
    ("sensor", "embedding", "reason"),
    [
        ("d", [1.0], "no sensor of this VFL run"),
        ("a", [1.0], "of the wrong length"),
        ("a", [], "of the wrong length"),
        ("b", [1.0, np.nan, 1.0], "not finite"),
        ("c", [-np.inf], "not finite"),
    ],
)
def test_what_cannot_be_used_is_named_and_opens_nothing(
    collector: EmbeddingCollector, sensor: str, embedding: list[float], reason: str
) -> None:
    assert (
        collector.add(sensor, "p", SensorEmbedding(np.array(embedding, np.float32), 1, 0.0))
        == reason
    )
    assert collector.next_deadline() is None
    assert collector.take_due(0.0) == []


def test_a_sensor_that_invents_products_closes_its_own_and_nobody_elses(
    collector: EmbeddingCollector,
) -> None:
    collector.add("b", "real", part("b"))
    collector.take_due(0.0)
    for number in range(1000):
        collector.add("a", f"invented-{number}", part("a"))
    due = seen(collector.take_due(0.0))
    # what it may have open at a time
    assert len([each for each in due if each[1] == "partial"]) == 3
    assert all(product.startswith("invented") for product, *_ in due)
    collector.add("a", "real", part("a"))
    collector.add("c", "real", part("c"))
    assert seen(collector.take_due(0.0)) == [("real", "final", "abc")]
    assert len(collector._open) + len(collector._closed) <= 3 * 9


def test_at_the_end_all_that_is_open_is_answered(collector: EmbeddingCollector) -> None:
    collector.add("a", "p", part("a"))
    collector.add("c", "q", part("c"))
    assert seen(collector.close_all()) == [("p", "final", "a"), ("q", "final", "c")]


def test_who_comes_after_gives_no_second_final_answer(collector: EmbeddingCollector) -> None:
    collector.add("a", "p", part("a"))
    collector.close_all()
    after = EmbeddingCollector(SENSORS, deadline=1.0, closed=collector.closed)
    assert after.add("a", "p", part("a")) == "there already"
    assert after.add("b", "p", part("b")) == "late"
    assert after.take_due(5.0) == []


@pytest.mark.parametrize("seed", range(5))
def test_every_product_has_one_final_answer_whatever_the_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    collector, clock, finals = EmbeddingCollector(SENSORS, deadline=0.3), 0.0, []
    messages = [
        (f"p{number}", sensor) for number in range(50) for sensor in "abc" if random.random() < 0.8
    ]
    order = np.argsort(np.arange(len(messages)) + random.normal(0, 20, len(messages)))
    for product, sensor in (messages[index] for index in order):
        clock += random.exponential(0.01)
        collector.add(sensor, product, part(sensor, at=clock))
        finals += [each.product for each in collector.take_due(clock) if each.answer == "final"]
    finals += [each.product for each in collector.close_all()]
    assert sorted(finals) == sorted({product for product, _ in messages})


@pytest.mark.parametrize("value", [3e38, -2e6])
def test_an_embedding_that_would_outvote_all_others_is_left_out(
    value: float, collector: EmbeddingCollector
) -> None:
    assert (
        collector.add("a", "p", SensorEmbedding(np.float32([1, value]), 7, 0.0)) == "far too large"
    )
    assert collector.take_due(0.0) == []
