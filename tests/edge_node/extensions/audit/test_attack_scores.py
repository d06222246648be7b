"""How attacks are judged, against what is known by hand."""

import numpy as np
import pytest
import torch

from edge_node.extensions.audit.attack_scores import (
    agreement,
    compare_pictures,
    membership,
    to_pictures,
)
from tests.support.audited_plant import striped
from trainer.seeding import generator


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_chance_is_what_a_guess_of_equal_shares_reaches_on_average(classes: int) -> None:
    drawn = generator(0, classes).dirichlet(np.ones(classes), 40_000)
    reached = 1 - np.abs(drawn - 1 / classes).sum(1) / 2
    one_sided = agreement(
        np.ones(classes), striped([3] + [0] * (classes - 1), 0), "sums", "equal shares"
    )
    assert one_sided.chance == pytest.approx(reached.mean(), abs=0.005)
    assert one_sided.told == 0
    assert agreement(
        np.ones(classes), striped([3] * classes, 0), "sums", "any"
    ).chance == pytest.approx(1)


def test_negative_counts_count_as_none_and_no_guess_tells_nothing_if_shares_are_equal() -> None:
    assert agreement(np.array([4.0, 4.0, -3.0]), striped([4, 4, 0], 0), "sums", "any").value == 1
    assert agreement(np.array([-1.0, -1.0, -1.0]), striped([4, 4, 4], 0), "sums", "any").told == 0
    assert agreement(np.array([4.0, 4.0, 4.0]), striped([4, 4, 4], 0), "sums", "read").told == 1
    assert (
        agreement(np.array([4.0, 4.2, 3.9]), striped([4, 4, 4], 0), "sums", "nearly equal").told
        == 0
    )


def test_scores_of_one_side_alone_say_nothing() -> None:
    assert membership(np.arange(4.0), 4, "sums", "any") == []
    (found,) = membership(np.array([2.0, 3.0, 0.0, 1.0]), 2, "sums", "any")
    assert found.value == 1
    assert found.low == found.high == 1


def test_a_picture_of_an_image_is_like_it_and_one_that_fits_any_image_tells_nothing() -> None:
    sent, unsent = striped([4, 4, 4], 0), striped([4, 4, 4], 1)
    blind = torch.full((3, 32, 32), 0.5)
    exact, pictures = compare_pictures(
        [to_pictures(sent)[1]], None, sent, unsent, "sums", "any", blind
    )
    assert exact[0].value == pytest.approx(1)
    assert exact[0].told > 0.5
    assert np.array_equal(pictures[0].nearest[0], sent.images[1])
    useless, _ = compare_pictures([blind], None, sent, unsent, "sums", "any", blind)
    assert useless[0].told == pytest.approx(0, abs=0.05)


def test_a_class_whose_images_were_all_sent_has_nothing_to_be_compared_with() -> None:
    sent, unsent = striped([2, 2, 0], 0), striped([2, 0, 0], 1)
    made = list(to_pictures(sent)[:2])
    found, pictures = compare_pictures(made, [0, 1], sent, unsent, "sums", "any", made[0])
    assert len(found) == 1
    assert len(pictures[0].made) == 1
    assert compare_pictures(
        made, None, sent, unsent.take(np.arange(0)), "sums", "any", made[0]
    ) == ([], ())
