"""The order in which images are labelled, and groups of similar ones."""

import numpy as np

from edge.labelling.label_order import SimilarityGroups, instructiveness, order


def test_an_image_joins_the_likest_group_or_begins_one() -> None:
    groups, axes = SimilarityGroups(), np.eye(4, dtype=np.float32)
    first = [groups.add("model", axis) for axis in axes]
    assert len(set(first)) == 4
    assert [groups.add("model", 5 * axis + 0.1) for axis in axes] == first


def test_many_groups_are_kept_apart() -> None:
    groups, axes = SimilarityGroups(), np.eye(100, dtype=np.float32)
    assert len({groups.add("model", axis) for axis in axes}) == 100
    assert len({groups.add("model", axis) for axis in axes}) == 100


def test_features_of_two_models_and_images_without_any_have_nothing_in_common() -> None:
    groups, same = SimilarityGroups(), np.ones(4, np.float32)
    assert (
        len(
            {
                groups.add("one", same),
                groups.add("other", same),
                groups.add("one", None),
                groups.add("one", None),
            }
        )
        == 4
    )


def test_the_most_uncertain_and_the_most_novel_are_the_most_instructive() -> None:
    found = instructiveness(np.array([0.1, 0.9, 0.1, 0.9]), np.array([0.0, 0.0, 0.5, 0.5]))
    assert found.tolist() == [0, 1, 1, 2]
    assert instructiveness(np.ones(3), np.zeros(3)).tolist() == [0, 0, 0]
    assert instructiveness(np.array([]), np.array([])).tolist() == []


def test_of_each_group_one_comes_before_any_group_s_second() -> None:
    scores, groups = np.array([9, 8, 7, 3, 2, 1]), np.array([5, 5, 5, 6, 6, 7])
    assert order(scores, groups).tolist() == [0, 3, 5, 1, 4, 2]
