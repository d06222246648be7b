"""When the head predicts a product: as its embeddings arrive, in whatever order, from whomever."""

import numpy as np
import pytest

from edge.vfl.member_bundle import Source
from edge.vfl.product_embeddings import Due, Gather, Part

SENSORS = (Source(name="a", size=2), Source(name="b", size=3), Source(name="c", size=1))
SIZES = {each.name: each.size for each in SENSORS}


def part(sensor: str, at: float = 0.0, round_: int = 7) -> Part:
    return Part(np.ones(SIZES[sensor], np.float32), round_, at)


def seen(due: list[Due]) -> list[tuple[str, str, str]]:
    """Product, kind of answer, and the sensors that have reported."""
    return [(each.product, each.answer, "".join(sorted(each.parts))) for each in due]


@pytest.fixture
def gather() -> Gather:
    return Gather(SENSORS, deadline=1.0, most=9)


def test_each_embedding_brings_a_partial_prediction_and_the_last_one_the_final(gather: Gather) -> None:
    answers = []
    for sensor in "cab":
        assert gather.add(sensor, "p", part(sensor)) is None
        answers += seen(gather.due(0.0))
    assert answers == [("p", "partial", "c"), ("p", "partial", "ac"), ("p", "final", "abc")]
    assert gather.due(5.0) == []
    assert gather.wait() is None


def test_what_arrives_together_is_answered_once(gather: Gather) -> None:
    for product in ("p", "q"):
        gather.add("a", product, part("a"))
        gather.add("b", product, part("b"))
    gather.add("c", "q", part("c"))
    assert seen(gather.due(0.0)) == [("q", "final", "abc"), ("p", "partial", "ab")]
    assert gather.due(0.5) == []


def test_after_the_deadline_a_product_has_its_final_answer_from_what_is_there(gather: Gather) -> None:
    gather.add("a", "p", part("a", at=10.0))
    gather.due(10.0)
    gather.add("b", "p", part("b", at=10.9))
    assert gather.wait() == pytest.approx(11.0)  # counted from the first embedding
    assert seen(gather.due(10.99)) == [("p", "partial", "ab")]
    assert seen(gather.due(11.0)) == [("p", "final", "ab")]
    assert gather.add("c", "p", part("c", at=11.1)) == "late"
    assert gather.add("a", "p", part("a", at=11.1)) == "there already"
    assert gather.due(20.0) == []


def test_a_second_embedding_of_a_sensor_changes_nothing(gather: Gather) -> None:
    first = part("a")
    gather.add("a", "p", first)
    assert gather.add("a", "p", Part(np.zeros(2, np.float32), 8, 0.1)) == "there already"
    assert gather.due(0.1)[0].parts["a"] is first


@pytest.mark.parametrize(
    ("sensor", "embedding", "reason"),
    [
        ("d", [1.0], "no sensor of this line"),
        ("a", [1.0], "of the wrong length"),
        ("a", [], "of the wrong length"),
        ("b", [1.0, np.nan, 1.0], "not finite"),
        ("c", [-np.inf], "not finite"),
    ],
)
def test_what_cannot_be_used_is_named_and_opens_nothing(
    gather: Gather, sensor: str, embedding: list[float], reason: str
) -> None:
    assert gather.add(sensor, "p", Part(np.array(embedding, np.float32), 1, 0.0)) == reason
    assert gather.wait() is None
    assert gather.due(0.0) == []


def test_a_sensor_that_invents_products_closes_its_own_and_nobody_elses(gather: Gather) -> None:
    gather.add("b", "real", part("b"))
    gather.due(0.0)
    for number in range(1000):
        gather.add("a", f"invented-{number}", part("a"))
    due = seen(gather.due(0.0))
    assert len([each for each in due if each[1] == "partial"]) == 3  # what it may have open at a time
    assert all(product.startswith("invented") for product, *_ in due)
    gather.add("a", "real", part("a"))
    gather.add("c", "real", part("c"))
    assert seen(gather.due(0.0)) == [("real", "final", "abc")]
    assert len(gather._open) + len(gather._closed) <= 3 * 9


def test_at_the_end_all_that_is_open_is_answered(gather: Gather) -> None:
    gather.add("a", "p", part("a"))
    gather.add("c", "q", part("c"))
    assert seen(gather.finish()) == [("p", "final", "a"), ("q", "final", "c")]


def test_who_comes_after_gives_no_second_final_answer(gather: Gather) -> None:
    gather.add("a", "p", part("a"))
    gather.finish()
    after = Gather(SENSORS, deadline=1.0, closed=gather.closed)
    assert after.add("a", "p", part("a")) == "there already"
    assert after.add("b", "p", part("b")) == "late"
    assert after.due(5.0) == []


@pytest.mark.parametrize("seed", range(5))
def test_every_product_has_one_final_answer_whatever_the_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    gather, clock, finals = Gather(SENSORS, deadline=0.3), 0.0, []
    messages = [(f"p{number}", sensor) for number in range(50) for sensor in "abc" if random.random() < 0.8]
    order = np.argsort(np.arange(len(messages)) + random.normal(0, 20, len(messages)))
    for product, sensor in (messages[index] for index in order):
        clock += random.exponential(0.01)
        gather.add(sensor, product, part(sensor, at=clock))
        finals += [each.product for each in gather.due(clock) if each.answer == "final"]
    finals += [each.product for each in gather.finish()]
    assert sorted(finals) == sorted({product for product, _ in messages})


@pytest.mark.parametrize("value", [3e38, -2e6])
def test_an_embedding_that_would_outvote_all_others_is_left_out(value: float, gather: Gather) -> None:
    assert gather.add("a", "p", Part(np.float32([1, value]), 7, 0.0)) == "far too large"
    assert gather.due(0.0) == []
