"""Simulated plants share a data set: each image in one place, each count as asked,
the same for the same seed.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_config.protocol.errors import UsageError
from tests.support import plants
from trainer.data import class_folders, partition
from trainer.data.class_folders import Catalogue
from trainer.data.folder_scan import Entry
from trainer.data.partition import Scheme, Share
from trainer.data.partitions import PARTITIONS, make

CLASSES = ("crazing", "inclusion", "patches", "pitted", "scale", "scratches")
PLENTY = dict.fromkeys(CLASSES, 200)
SEEDS = range(6)
# the others take several
ONE_SOURCE = [name for name in PARTITIONS if make(name, {}).within_source() is None]
schemes = pytest.mark.parametrize("scheme", ONE_SOURCE)


def catalogue(counts: Mapping[str, int] = PLENTY) -> Catalogue:
    """Entries without files: so many images of each class."""
    entries = [
        Entry(
            Path(f"{name}/{number}.png"),
            name,
            hashlib.sha256(f"{name} {number}".encode()).hexdigest(),
        )
        for name, count in counts.items()
        for number in range(count)
    ]
    return Catalogue(tuple(sorted(entries, key=lambda entry: entry.digest)))


def digests(part: Catalogue) -> list[str]:
    return [entry.digest for entry in part.entries]


def layout(shares: list[Share]) -> list[tuple[str, list[str], list[str]]]:
    """Who holds which digests on which side."""
    return [(share.node, digests(share.train), digests(share.test)) for share in shares]


def classes(part: Catalogue) -> Counter[str]:
    return Counter(entry.class_name for entry in part.entries)


@schemes
@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_images_are_of_the_nodes_classes_in_their_proportions(
    scheme: str, seed: int
) -> None:
    for share in Scheme(scheme, 3, 10, seed, test_samples=60).shares(catalogue()):
        train, test = classes(share.train), classes(share.test)
        assert train.keys() == test.keys()
        assert all(abs(test[name] - 6 * count) <= 1 for name, count in train.items())
        assert test.total() == 60


@schemes
def test_the_seed_alone_decides(scheme: str) -> None:
    one, same, other = (
        layout(Scheme(scheme, 4, 10, seed).shares(catalogue())) for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


@schemes
def test_renaming_and_moving_files_changes_nothing(scheme: str, tmp_path: Path) -> None:
    folder = plants.draw(tmp_path / "images", 12, seed=1, size=4)
    request = Scheme(scheme, 2, 6, 3, pool="all")
    before = layout(request.shares(class_folders.scan(folder)))
    for number, entry in enumerate(class_folders.scan(folder).entries):
        entry.path.rename(
            entry.path.with_name(f"{(5 * number) % 36:02}.{('bmp', 'jpg')[number % 2]}")
        )
    assert layout(request.shares(class_folders.scan(folder.rename(tmp_path / "moved")))) == before


def test_iid_nodes_all_have_the_same_number_of_each_class() -> None:
    shares = Scheme("iid", 3, 14, 0).shares(catalogue())
    assert all(classes(share.train) == classes(shares[0].train) for share in shares)
    assert sorted(classes(shares[0].train).values()) == [2, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("nodes", "each"), [(3, 2), (5, 2), (2, 4), (4, 6), (7, 5)])
def test_disjoint_nodes_have_as_many_classes_as_asked_evenly_and_no_class_is_left_out(
    seed: int, nodes: int, each: int
) -> None:
    shares = Scheme("disjoint", nodes, 20, seed, options={"classes_per_node": each}).shares(
        catalogue()
    )
    for share in shares:
        counts = classes(share.train)
        assert len(counts) == each
        assert max(counts.values()) - min(counts.values()) <= 1
    holders = Counter(name for share in shares for name in classes(share.train))
    assert holders.keys() == set(CLASSES)
    assert max(holders.values()) - min(holders.values()) <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_disjoint_nodes_draw_their_classes_by_themselves_if_asked_to(seed: int) -> None:
    shares = Scheme("disjoint,deal=random", 5, 10, seed, options={"classes_per_node": 3}).shares(
        catalogue()
    )
    mine = [frozenset(classes(share.train)) for share in shares]
    assert [len(names) for names in mine] == [3] * 5
    assert all(sorted(classes(share.train).values()) == [3, 3, 4] for share in shares)


def test_drawn_classes_overlap_more_than_dealt_ones() -> None:
    def held_by_nobody(partition: str) -> list[int]:
        many = [Scheme(partition, 5, 10, seed).shares(catalogue()) for seed in range(20)]
        return [
            len(set(CLASSES) - {name for share in shares for name in classes(share.train)})
            for shares in many
        ]

    assert not any(held_by_nobody("disjoint"))
    assert any(held_by_nobody("disjoint,deal=random"))


def test_which_classes_a_disjoint_node_has_depends_on_the_seed() -> None:
    shares = [Scheme("disjoint", 5, 10, seed).shares(catalogue()) for seed in SEEDS]
    assert len({frozenset(classes(drawn[0].train)) for drawn in shares}) > 1


def test_a_smaller_alpha_makes_dirichlet_nodes_differ_more() -> None:
    def largest(alpha: float) -> int:
        shares = [
            Scheme("dirichlet", 5, 20, seed, options={"alpha": alpha}).shares(catalogue())
            for seed in SEEDS
        ]
        return sum(max(classes(share.train).values()) for drawn in shares for share in drawn)

    assert largest(0.05) > largest(1.0) > largest(100.0)


# Groups of nodes


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("nodes", "each"), [(6, 1), (8, 1), (3, 2), (7, 2), (2, 3), (5, 4), (3, 6)]
)
def test_no_class_is_in_two_groups_and_nodes_of_one_group_have_its_classes_evenly(
    seed: int, nodes: int, each: int
) -> None:
    shares = Scheme("groups", nodes, 20, seed, options={"classes_per_node": each}).shares(
        catalogue()
    )
    count = -(-len(CLASSES) // each)
    groups = [set(classes(share.train)) for share in shares[:count]]
    assert sorted(name for group in groups for name in group) == sorted(CLASSES)
    assert [len(group) for group in groups[:-1]] == [each] * (count - 1)
    for number, share in enumerate(shares):
        assert classes(share.train).keys() == classes(share.test).keys() == groups[number % count]
        assert max(classes(share.train).values()) - min(classes(share.train).values()) <= 1


def test_which_classes_make_a_group_depends_on_the_seed() -> None:
    shares = [Scheme("groups", 3, 10, seed).shares(catalogue()) for seed in SEEDS]
    assert len({frozenset(classes(drawn[0].train)) for drawn in shares}) > 1


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_within_sources_have_the_images_of_one_source_and_the_same_classes_in_each(
    seed: int,
) -> None:
    sources = [stretch(name, dict.fromkeys(CLASSES, 90)) for name in "ab"]
    shares = Scheme("sources_groups", 7, 12, seed, options={"classes_per_node": 2}).shares(*sources)
    assert [share.node for share in shares] == [f"plant-{number}" for number in range(1, 8)]
    assert [of(share) for share in shares] == [{"a"}, {"b"}, {"a"}, {"b"}, {"a"}, {"b"}, {"a"}]
    groups = [set(classes(share.train)) for share in shares]
    assert groups[0] == groups[1] == groups[6]
    assert groups[2] == groups[3]
    assert groups[0] | groups[2] | groups[4] == set(CLASSES)


def test_a_source_with_fewer_nodes_than_groups_of_its_classes_is_refused() -> None:
    sources = [stretch(name, dict.fromkeys(CLASSES, 90)) for name in "ab"]
    scheme, complaint = (
        Scheme("sources_groups", 5, 12, 0, options={"classes_per_node": 2}),
        "the nodes of source 2, 2 of 5, cannot ",
    )
    with pytest.raises(UsageError, match=complaint + ".*3 groups of 2 of 6") as caught:
        scheme.shares(*sources)
    assert "--nodes 6 or more" in caught.value.remedy
    assert len(scheme._replace(nodes=6).shares(*sources)) == 6


def test_groups_of_several_sources_take_the_nodes_of_the_source_with_most_classes() -> None:
    sources = [stretch(str(count), dict.fromkeys(CLASSES[:count], 90)) for count in (1, 4, 2)]
    scheme = Scheme("sources_groups", 3, 12, 0, options={"classes_per_node": 1})
    with pytest.raises(UsageError, match=r"source 2, 1 of 3,.*4 groups") as caught:
        scheme.shares(*sources)
    assert "--nodes 11 or more" in caught.value.remedy
    with pytest.raises(UsageError, match="source 2, 3 of 10"):
        scheme._replace(nodes=10).shares(*sources)
    assert len(scheme._replace(nodes=11).shares(*sources)) == 11


# Options


def test_options_may_follow_the_name_of_a_partition_and_count_before_those_of_any() -> None:
    written = Scheme("dirichlet,alpha=0.5", 4, 10, 0, {"alpha": 100.0, "classes_per_node": 9})
    assert layout(written.shares(catalogue())) == layout(
        Scheme("dirichlet", 4, 10, 0, {"alpha": 0.5}).shares(catalogue())
    )


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("dirichlet,alhpa=1", "dirichlet has no option 'alhpa'", "did you mean 'alpha'?"),
        ("iid,alpha=1", "iid has no option 'alpha'", "leave it out"),
        ("dirichlet,alpha=0", "an option of dirichlet cannot have this value", "a value above 0.0"),
        ("dirichlet,alpha", "is not NAME,OPTION=VALUE", "dirichlet,alpha=0.5"),
        ("dirichlet,alpha=1,alpha=2", "each option once", "dirichlet,alpha=0.5"),
        (
            "groups,classes_per_node=two",
            "an option of groups cannot have this value",
            "a value of its type",
        ),
    ],
)
def test_an_option_that_there_is_not_is_answered_with_the_remedy(
    text: str, what: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        Scheme(text, 4, 10, 0).shares(catalogue())
    assert remedy in caught.value.remedy


# Images that all nodes train on


@pytest.mark.parametrize("scheme", PARTITIONS)
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_shared_images_are_the_same_ones_of_each_class_for_all_and_leave_everything_else_as_it_was(
    scheme: str, seed: int
) -> None:
    sources = [stretch(name, dict.fromkeys(CLASSES, 400)) for name in "ab"]
    request = Scheme(scheme, 6, 12, seed, options={"alpha": 1.0}, test_samples=20)
    own, beside = request.shares(*sources), request._replace(shared=5).shares(*sources)
    added = [
        set(digests(after.train)) - set(digests(before.train))
        for before, after in zip(own, beside, strict=True)
    ]
    assert all(common == added[0] for common in added)
    assert Counter(classes_of(sources, added[0])) == dict.fromkeys(CLASSES, 5)
    for before, after in zip(own, beside, strict=True):
        assert after.test == before.test
        assert set(digests(before.train)) < set(digests(after.train))
        assert digests(after.train) == sorted(digests(after.train))


def test_shared_images_are_of_all_sources_that_have_their_class() -> None:
    sources = [stretch("a", {"rust": 60, "scale": 60}), stretch("b", {"ash": 60, "scale": 60})]
    (first, _) = Scheme("sources", 2, 8, 0, shared=7).shares(*sources)
    common = Counter((entry.path.parts[0], entry.class_name) for entry in first.train.entries)
    assert common == {
        ("a", "rust"): 4 + 7,
        ("a", "scale"): 4 + 4,
        ("b", "ash"): 7,
        ("b", "scale"): 3,
    }


def test_a_class_that_lacks_images_for_all_is_named() -> None:
    images = catalogue({"common": 100, "rare": 22})
    with pytest.raises(
        UsageError,
        match=r"20 images.*3 common.*rare lacks 3 of 25",
    ):
        Scheme("iid", 2, 20, 0, pool="all", shared=3).shares(images)


# Too few images


@pytest.mark.parametrize(
    ("scheme", "lacking"),
    [
        # 2 nodes, 20 images, half of them `rare`: 20 to train, and one each to hold out.
        (Scheme("iid", 2, 20, 0, pool="all"), "class rare lacks 12 of 22 images"),
        (Scheme("disjoint", 2, 20, 0, pool="all"), "class rare lacks 12 of 22 images"),
        (Scheme("dirichlet", 2, 2000, 0, pool="all"), "class common lacks "),
    ],
)
def test_an_impossible_request_says_which_class_lacks_how_many_images(
    scheme: Scheme, lacking: str
) -> None:
    with pytest.raises(UsageError, match=lacking) as caught:
        scheme.shares(catalogue({"common": 100, "rare": 10}))
    assert "--samples" in caught.value.remedy


def test_images_that_just_suffice_are_enough() -> None:
    shares = Scheme("iid", 2, 20, 0, pool="all").shares(catalogue({"common": 22, "rare": 22}))
    assert [classes(share.test) for share in shares] == [{"common": 1, "rare": 1}] * 2


@pytest.mark.parametrize("seed", range(10))
def test_what_a_scarce_class_has_left_is_shared_in_proportion_to_the_last_image_and_never_to_none(
    seed: int,
) -> None:
    images = catalogue(dict.fromkeys(CLASSES, 70))
    shares = Scheme("dirichlet", 8, 20, seed, options={"alpha": 1.0}, pool="all").shares(images)
    train = sum((classes(share.train) for share in shares), Counter[str]())
    test = sum((classes(share.test) for share in shares), Counter[str]())
    for share in shares:
        assert classes(share.train).keys() == classes(share.test).keys()
    asked = {name: sum(3 * classes(share.train)[name] for share in shares) for name in CLASSES}
    # 3 images are rounded a little
    scarce = [name for name in CLASSES if asked[name] > 70 - train[name] + 4]
    assert scarce
    assert all(train[name] + test[name] == 70 for name in scarce)


@pytest.mark.parametrize(
    ("scheme", "hint"),
    [
        (Scheme("disjunct", 2, 4, 0), "did you mean 'disjoint'?"),
        (Scheme("iid", 2, 4, 0, pool="train"), "take one of report, tuning, all"),
        (Scheme("disjoint", 2, 20, 0, options={"classes_per_node": 7}), "fewer --classes-per-node"),
        (Scheme("disjoint", 2, 3, 0, options={"classes_per_node": 4}), "fewer --classes-per-node"),
        (Scheme("groups", 6, 20, 0, options={"classes_per_node": 7}), "fewer --classes-per-node"),
        (Scheme("groups", 5, 20, 0, options={"classes_per_node": 1}), "take --nodes 6 or more"),
    ],
    ids=[
        "no such partition",
        "no such pool",
        "more classes than there are",
        "more classes than images",
        "a group of more classes than there are",
        "more groups than nodes",
    ],
)
def test_a_request_that_makes_no_sense_says_what_would(scheme: Scheme, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        scheme.shares(catalogue())
    assert hint in caught.value.remedy


def test_a_source_without_images_of_its_own_is_named() -> None:
    images = catalogue()
    with pytest.raises(UsageError, match=r"source 2.*report"):
        Scheme("sources", 2, 4, 0).shares(images, images)


# The tuning and the report pool


def test_pools_are_disjoint_exhaustive_and_of_about_a_third_and_two_thirds() -> None:
    images = catalogue()
    tuning, report = (
        set(digests(partition.select_pool(images, name))) for name in ("tuning", "report")
    )
    assert not tuning & report
    assert (
        tuning | report
        == set(digests(images))
        == set(digests(partition.select_pool(images, "all")))
    )
    assert 0.3 < len(tuning) / len(images.entries) < 0.37


def test_an_image_stays_in_its_pool_when_others_come_and_go() -> None:
    few, many = (
        partition.select_pool(catalogue({"patches": count}), "tuning") for count in (50, 100)
    )
    assert set(digests(few)) <= set(digests(many))


# Several sources

SCHEMES = st.sampled_from(list(PARTITIONS))
STEEL = {
    "crazing": 300,
    "inclusion": 300,
    "patches": 299,
    "pitted": 300,
    "scale": 300,
    "scratches": 300,
}
ROLLED = {"ash": 122, "inclusion": 238, "printing": 203, "red": 388, "scale": 266, "scratches": 134}


def stretch(source: str, counts: Mapping[str, int], first: int = 0) -> Catalogue:
    """A source's images; those of one source and of another are the same if both are named
    alike.
    """
    entries = [
        Entry(
            Path(source, name, str(number)),
            name,
            hashlib.sha256(f"{name} {source} {number}".encode()).hexdigest(),
        )
        for name, count in counts.items()
        for number in range(first, first + count)
    ]
    return Catalogue(tuple(sorted(entries, key=lambda entry: entry.digest)))


def of(share: Share) -> set[str]:
    return {entry.path.parts[0] for part in (share.train, share.test) for entry in part.entries}


def classes_of(sources: list[Catalogue], chosen: set[str]) -> list[str]:
    return [
        entry.class_name for entry in class_folders.merge(sources).entries if entry.digest in chosen
    ]


@settings(max_examples=60)
@given(
    scheme=SCHEMES,
    seed=st.integers(0, 2**31),
    nodes=st.integers(2, 6),
    samples=st.integers(6, 20),
    held_out=st.integers(1, 80),
    pool=st.sampled_from(["report", "tuning", "all"]),
    twins=st.integers(0, 40),
    shared=st.integers(0, 12),
    each=st.integers(1, 6),
)
def test_whatever_is_asked_for_shares_are_exact_and_disjoint_or_a_class_is_named(
    scheme: str,
    seed: int,
    nodes: int,
    samples: int,
    held_out: int,
    pool: str,
    twins: int,
    shared: int,
    each: int,
) -> None:
    """Two sources of real sizes, some of whose images are the same in both."""
    both = stretch("both", {"inclusion": twins, "scratches": twins})
    sources = [
        class_folders.merge([both, stretch(name, counts)])
        for name, counts in (("a", STEEL), ("b", ROLLED))
    ]
    request = Scheme(
        scheme,
        nodes,
        samples,
        seed,
        {"classes_per_node": each, "alpha": 0.5},
        pool,
        held_out,
        shared,
    )
    try:
        shares = request.shares(*sources)
    except UsageError as error:
        lacks = (
            r"class \w+ lacks \d+ of \d+ images|nodes .*cannot have \d+ groups of \d of \d+ classes"
        )
        assert re.search(lacks, error.what)  # noqa: PT017
        return
    common = set.intersection(*(set(digests(share.train)) for share in shares))
    held = [
        digest for share in shares for part in (share.train, share.test) for digest in digests(part)
    ]
    own = [digest for digest in held if digest not in common]
    assert [share.node for share in shares] == [f"plant-{number + 1}" for number in range(nodes)]
    assert len(own) == len(set(own))
    assert set(held) <= set(digests(partition.select_pool(class_folders.merge(sources), pool)))
    assert set(Counter(classes_of(sources, common)).values()) <= {shared}
    for share in shares:
        assert not common & set(digests(share.test))
        assert all(sorted(digests(part)) == digests(part) for part in (share.train, share.test))
        train = Counter(
            entry.class_name for entry in share.train.entries if entry.digest not in common
        )
        test = classes(share.test)
        assert train.total() == samples
        assert train.keys() == test.keys()
        assert test.total() <= max(held_out, len(test))


@pytest.mark.parametrize("seed", SEEDS)
def test_each_node_has_its_images_from_one_source_in_turn_evenly_over_its_classes(
    seed: int,
) -> None:
    sources = [stretch("a", STEEL), stretch("b", ROLLED), stretch("c", {"rust": 100, "scale": 100})]
    shares = Scheme("sources", 5, 12, seed).shares(*sources)
    assert [of(share) for share in shares] == [{"a"}, {"b"}, {"c"}, {"a"}, {"b"}]
    assert [share.node for share in shares] == [f"plant-{number}" for number in range(1, 6)]
    assert [classes(share.train) for share in shares] == [
        {name: 12 // len(source.classes) for name in source.classes}
        for source in (*sources, *sources[:2])
    ]


def test_an_image_that_two_sources_have_is_the_first_ones() -> None:
    both = stretch("both", {"rust": 30, "scale": 30})
    sources = [both, class_folders.merge([both, stretch("b", {"rust": 30, "scale": 30})])]
    shares = Scheme("sources", 2, 10, 0, pool="all", test_samples=50).shares(*sources)
    assert [of(share) for share in shares] == [{"both"}, {"b"}]


def test_other_partitions_mix_the_sources() -> None:
    shares = Scheme("iid", 2, 12, 0).shares(stretch("a", STEEL), stretch("b", ROLLED))
    assert [of(share) for share in shares] == [{"a", "b"}] * 2


def test_a_source_that_has_too_few_images_is_named() -> None:
    with pytest.raises(
        UsageError,
        match=r"2 iid .*source 2.*rust lacks 7 of 12",
    ):
        Scheme("sources", 4, 10, 0, pool="all").shares(
            stretch("a", STEEL), stretch("b", {"rust": 5, "scale": 50})
        )


def test_sources_without_a_node_are_refused() -> None:
    with pytest.raises(UsageError, match=r"1 nodes.*2 sources"):
        Scheme("sources", 1, 10, 0).shares(stretch("a", STEEL), stretch("b", ROLLED))


def test_the_nearest_of_dirichlets_draws_is_what_an_impossible_request_names() -> None:
    images = catalogue({"common": 100, "rare": 10})
    with pytest.raises(UsageError) as caught:
        Scheme("dirichlet", 2, 60, 0, options={"alpha": 100.0}, pool="all").shares(images)
    assert "not in 200 draws; in the nearest: class " in caught.value.what
    # all but the luckiest draws lack 52
    assert sum(map(int, re.findall(r"lacks (\d+)", caught.value.what))) < 45


@pytest.mark.parametrize("total", [3, 10, 11, 30])
def test_held_out_images_are_as_many_as_asked_although_rare_classes_have_one_each(
    total: int,
) -> None:
    """Of 20 training images one or two of some classes: less than half an image of 10."""
    for seed in SEEDS:
        for share in Scheme(
            "dirichlet", 2, 20, seed, options={"alpha": 0.3}, test_samples=total
        ).shares(catalogue()):
            assert classes(share.test).total() == max(total, len(classes(share.train)))


def test_sources_on_disk_come_under_common_classes_and_keep_their_images_apart(
    tmp_path: Path,
) -> None:
    one = plants.draw(tmp_path / "one", 14, seed=1, classes=("inclusion", "scratches"), size=4)
    two = plants.draw(tmp_path / "two", 14, seed=2, classes=("slag", "scratches"), size=4)
    copied = sorted((one / "inclusion").iterdir())[0]
    (two / "slag" / "copy.jpg").write_bytes(copied.read_bytes())
    sources = class_folders.scan_sources([one, two], {"slag": "inclusion"})
    assert [source.classes for source in sources] == [["inclusion", "scratches"]] * 2
    shares = Scheme("sources", 2, 6, 0, pool="all").shares(*sources)
    assert all(
        path.is_relative_to(one) for path in (entry.path for entry in shares[0].train.entries)
    )
    held = [
        digest for share in shares for part in (share.train, share.test) for digest in digests(part)
    ]
    assert len(held) == len(set(held)) == 56
    assert {entry.path for entry in shares[1].test.entries}.isdisjoint({two / "slag" / "copy.jpg"})


def test_an_image_of_different_classes_in_two_sources_is_refused_unless_they_are_one(
    tmp_path: Path,
) -> None:
    folders = [
        plants.draw(tmp_path / name, 2, seed=1, classes=(name,), size=4)
        for name in ("inclusion", "slag_inclusion")
    ]
    with pytest.raises(UsageError, match="two classes"):
        class_folders.scan_sources(folders, {})
    sources = class_folders.scan_sources(folders, {"slag_inclusion": "inclusion"})
    assert len(class_folders.merge(sources).entries) == 2


def test_an_alias_that_no_folder_has_is_answered_with_the_nearest(tmp_path: Path) -> None:
    folder = plants.draw(tmp_path / "images", 2, seed=1, size=4)
    with pytest.raises(UsageError, match="'scratch'") as caught:
        class_folders.scan_sources([folder], {"scratch": "scratches"})
    assert "did you mean 'scratches'?" in caught.value.remedy


# As folders


@schemes
def test_written_shares_are_read_back_with_the_same_images_in_the_same_classes(
    scheme: str, tmp_path: Path
) -> None:
    images = class_folders.scan(plants.draw(tmp_path / "images", 12, seed=1, size=4))
    shares = Scheme(scheme, 2, 6, 3, pool="all").shares(images)
    partition.write_shares(shares, tmp_path / "plants")
    assert sorted(path.name for path in (tmp_path / "plants").iterdir()) == ["plant-1", "plant-2"]
    for share in shares:
        for side, part in (("train", share.train), ("test", share.test)):
            found = class_folders.scan(tmp_path / "plants" / share.node / side)
            assert [entry[1:] for entry in found.entries] == [entry[1:] for entry in part.entries]
            assert found.findings == ()


# Groups of images that belong together

SHARES_EVER = {
    "disjoint": "f0a222d7",
    "dirichlet": "b285680e",
    "iid": "dc782f20",
    "groups": "30796bc3",
    "sources": "3a0bc5d1",
    "sources_groups": "937a6545",
}


def sides(shares: list[Share]) -> dict[str, str]:
    """Where each digest is."""
    return {
        digest: f"{share.node} {side}"
        for share in shares
        for side, part in (("train", share.train), ("test", share.test))
        for digest in digests(part)
    }


@settings(max_examples=25)
@given(SCHEMES, st.integers(0, 5), st.integers(1, 6), st.booleans(), st.integers(0, 2))
def test_a_group_is_on_one_side_of_one_node_and_each_still_gets_its_training_images(
    scheme: str, seed: int, size: int, mixed: bool, shared: int
) -> None:
    sources = [stretch(name, dict.fromkeys(CLASSES, 90)) for name in "ab"]
    entries = [entry for source in sources for entry in source.entries]
    if not mixed:
        entries.sort(key=lambda entry: entry.class_name)  # groups of one class, but for few
    groups = {entry.digest: number // size for number, entry in enumerate(entries)}
    request = Scheme(
        scheme, 6, 12, seed, options={"alpha": 1.0}, pool="all", test_samples=20, shared=shared
    )
    shares = request.shares(*sources, groups=groups)
    common = set.intersection(*(set(digests(share.train)) for share in shares))
    where: dict[int, set[str]] = {}
    for digest, side in sides(shares).items():
        where.setdefault(groups[digest], set()).add("all" if digest in common else side)
    assert all(len(found) == 1 for found in where.values())
    for share in shares:
        assert len(set(digests(share.train)) - common) == 12
        own = Catalogue(tuple(entry for entry in share.train.entries if entry.digest not in common))
        assert classes(share.test).keys() == classes(own).keys()


@pytest.mark.parametrize("scheme", PARTITIONS)
def test_without_look_alikes_shares_are_what_they_ever_were(scheme: str) -> None:
    """The results that research has stored depend on it."""
    sources = [stretch(name, STEEL) for name in "ab"]
    alone = {
        entry.digest: number for number, entry in enumerate(class_folders.merge(sources).entries)
    }
    request = Scheme(scheme, 6, 12, seed=1, options={"alpha": 0.5}, shared=3)
    shares = layout(request.shares(*sources))
    assert layout(request.shares(*sources, groups=alone)) == shares
    assert hashlib.sha256(json.dumps(shares).encode()).hexdigest()[:8] == SHARES_EVER.get(scheme)


# Settings of every partition, and digests of their shares: each image on its own, and images in
# pairs.
SETTINGS_EVER = [
    (Scheme("disjoint", 5, 10, 0), "9606c200", "338e5ca4"),
    (Scheme("disjoint", 5, 6, 1, {"classes_per_node": 3}), "6506e611", "f7b489be"),
    (
        Scheme(
            "disjoint", 10, 5, 2, {"classes_per_node": 4}, pool="tuning", test_samples=5, shared=1
        ),
        "daa63ab5",
        "a72991ee",
    ),
    (Scheme("dirichlet", 5, 10, 0), "dcae878c", "4298ce68"),
    (Scheme("dirichlet", 5, 3, 1, {"alpha": 0.1}), "aedeb434", "aff2e67c"),
    (
        Scheme("dirichlet", 8, 20, 2, {"alpha": 0.5}, pool="all", test_samples=30, shared=2),
        "a3c82b7a",
        "3065d6d2",
    ),
    (Scheme("iid", 5, 10, 0), "d1cc0a68", "e9d1f9ab"),
    (Scheme("iid", 4, 14, 1, pool="tuning", test_samples=20), "e958565c", "8b03e5cc"),
    (Scheme("iid", 3, 24, 2, pool="all", shared=5), "4f020d55", "9f750447"),
    (Scheme("groups", 8, 24, 0, {"classes_per_node": 2}), "5c6d9728", "220ed7e9"),
    (
        Scheme("groups", 9, 7, 1, {"classes_per_node": 1}, pool="tuning", test_samples=9),
        "2a17b908",
        "96906838",
    ),
    (
        Scheme("groups", 4, 12, 2, {"classes_per_node": 4}, pool="all", shared=3),
        "5907f6b7",
        "c8b9aa20",
    ),
    (Scheme("sources", 6, 24, 0), "22efe20f", "6c9cf338"),
    (Scheme("sources", 5, 14, 1, pool="tuning", test_samples=10), "33c1b87e", "c0154c10"),
    (Scheme("sources", 2, 30, 2, pool="all", shared=4), "f2b67144", "0d327a26"),
    (
        Scheme("sources_groups", 8, 24, 0, {"classes_per_node": 2}, pool="all", test_samples=30),
        "fac37780",
        "f9d3497b",
    ),
    (
        Scheme("sources_groups", 18, 8, 1, {"classes_per_node": 1}, test_samples=8),
        "b1ca3a3c",
        "8ba1c980",
    ),
    (
        Scheme(
            "sources_groups",
            6,
            12,
            2,
            {"classes_per_node": 3},
            pool="tuning",
            test_samples=9,
            shared=2,
        ),
        "21695528",
        "926a9b31",
    ),
]


def test_the_settings_are_of_every_partition() -> None:
    assert (
        {scheme.partition for scheme, _, _ in SETTINGS_EVER}
        == SHARES_EVER.keys()
        == PARTITIONS.keys()
    )


@pytest.mark.parametrize(("scheme", "alone", "paired"), SETTINGS_EVER)
def test_shares_of_a_setting_are_what_they_ever_were(
    scheme: Scheme, alone: str, paired: str
) -> None:
    sources = [stretch("a", STEEL), stretch("b", ROLLED)]
    pairs = {
        entry.digest: number // 2
        for number, entry in enumerate(class_folders.merge(sources).entries)
    }
    for groups, expected in (({}, alone), (pairs, paired)):
        shares = layout(scheme.shares(*sources, groups=groups))
        assert hashlib.sha256(json.dumps(shares).encode()).hexdigest()[:8] == expected


def test_too_few_groups_are_an_error_that_says_so() -> None:
    images = catalogue({"common": 60, "rare": 60})
    groups = {
        entry.digest: number // 20
        for number, entry in enumerate(sorted(images.entries, key=lambda e: e.path))
    }
    with pytest.raises(UsageError, match=r"common lacks .*look-alikes"):
        Scheme("iid", 2, 20, 0, pool="all").shares(images, groups=groups)


def test_fewer_images_are_held_out_where_groups_leave_no_more() -> None:
    images = catalogue({"common": 60, "rare": 60})
    groups = {
        entry.digest: number // 12
        for number, entry in enumerate(sorted(images.entries, key=lambda e: e.path))
    }
    shares = Scheme("iid", 2, 20, 0, pool="all").shares(images, groups=groups)
    assert [classes(share.train) for share in shares] == [{"common": 10, "rare": 10}] * 2
    assert all(
        1 <= classes(share.test)[name] <= 24 for share in shares for name in ("common", "rare")
    )
