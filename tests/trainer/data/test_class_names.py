"""A plant's name of a class is recognised by its spelling or as a technical term,
and a class is proposed, with why.
"""

from collections import Counter

import pytest

from broker_config.protocol.errors import UsageError
from trainer.data import class_names
from trainer.data.class_names import Proposal, add_votes, propose
from trainer.data.datasets import DATASETS

NEU = tuple(DATASETS["neu-cls"].classes)
GC10 = tuple(DATASETS["gc10-det"].classes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Scratches", "scratch"),
        ("01_surface-scratch", "Scratch"),
        ("rolled-in_scale", "RolledInScale"),
        ("Löcher", "loecher"),
        ("Weißrost", "weissrost"),
        ("corrosión", "Corrosion"),
        ("pęknięcie", "pekniecie"),
        ("patches", "patch"),
        ("Oberflächenfehler 2", "oberflaechenfehler"),
        ("łuska", "luska"),
    ],
)
def test_case_accents_hyphens_numbers_plurals_and_fillers_do_not_matter(
    one: str, other: str
) -> None:
    assert class_names.normalise(one) == class_names.normalise(other)


def test_a_name_of_fillers_or_numbers_alone_keeps_them() -> None:
    assert (class_names.normalise("surface defect"), class_names.normalise("12")) == (
        "surface defect",
        "12",
    )


@pytest.mark.parametrize(
    ("name", "class_name", "reason"),
    [
        ("01_Scratch", "scratches", "the same but for its spelling"),
        ("slag_inclusions_deep", "inclusion", "one name has all words of the other"),
        ("scale", "rolled-in_scale", "another word for it"),
        ("scrathces", "scratches", "spelled alike"),
        ("Kratzer", "scratches", "German for it"),
        ("rayures", "scratches", "French for it"),
        ("Arañazos", "scratches", "Spanish for it"),
        ("graffi", "scratches", "Italian for it"),
        ("rysy", "scratches", "Polish for it"),
        ("Einschluesse", "inclusion", "German for it"),
        ("pitting", "pitted_surface", "another word for it"),
        ("Haarrisse", "crazing", "German for it"),
        ("Zunder", "rolled-in_scale", "German for it"),
        ("tiefe Kratzer", "scratches", "Kratzer is German for it"),
        ("Einschlus", "inclusion", "Einschluss is German for it"),
        ("KR-12", "scratches", "its alias"),
    ],
)
def test_a_class_is_proposed_by_name(name: str, class_name: str, reason: str) -> None:
    assert propose(name, NEU, {"kr": "scratches"}) == [Proposal(class_name, reason)]


def test_folders_of_public_data_sets_find_their_classes_in_pinyin() -> None:
    folders = (
        "1_chongkong",
        "2_hanfeng",
        "3_yueyawan",
        "4_shuiban",
        "5_youban",
        "6_siban",
        "7_yiwu",
        "8_yahen",
    )
    folders += ("9_zhehen", "10_yaozhe")
    assert [[each.class_name for each in propose(name, GC10)] for name in folders] == [
        [name] for name in GC10
    ]


def test_the_federation_may_speak_another_language_than_english() -> None:
    assert propose("scratch", ["Rost", "Kratzer"]) == [Proposal("Kratzer", "English for it")]
    assert propose("rayure", ["Rost", "Kratzer"]) == [Proposal("Kratzer", "French for it")]


def test_a_word_that_stands_for_several_classes_proposes_them_in_the_classes_order() -> None:
    assert [each.class_name for each in propose("Flecken", ["stain", "rust", "patches"])] == [
        "stain",
        "patches",
    ]


@pytest.mark.parametrize("name", ["Rost", "Schale", "crack", "part 7", "12", "划", "~"])
def test_nothing_is_proposed_for_what_is_something_else_or_nothing(name: str) -> None:
    assert propose(name, NEU) == []


@pytest.mark.parametrize(
    "other",
    [each for name, each in DATASETS.items() if name != "neu-cls"],
    ids=lambda each: each.name,
)
def test_no_class_of_one_data_set_is_taken_for_a_different_one_of_another(other: object) -> None:
    found = {name: [each.class_name for each in propose(name, NEU)] for name in other.classes}  # type: ignore[attr-defined]
    assert {name: each for name, each in found.items() if each} == {
        "x-sdd": {
            "oxide_scale_of_plate_system": ["rolled-in_scale"],
            "oxide_scale_of_temperature_system": ["rolled-in_scale"],
            "slag_inclusion": ["inclusion"],
            "surface_scratch": ["scratches"],
        },
        "gc10-det": {"inclusion": ["inclusion"]},
    }[other.name]  # type: ignore[attr-defined]


def test_every_term_has_a_language_and_a_form_and_stands_once_in_its_concept() -> None:
    assert all(
        term.key and term.language for terms in class_names._concepts().values() for term in terms
    )
    for concept, terms in class_names._concepts().items():
        doubled = [
            term
            for term, count in Counter((each.text, each.language) for each in terms).items()
            if count > 1
        ]
        assert doubled == [], concept


# What images look like


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        (
            {"scratches": 9, "patches": 1},
            Proposal("scratches", "German; 9 of 10 of its images look like it to bundle"),
        ),
        (
            {"patches": 9, "scratches": 1},
            Proposal("scratches", "German; but 9 of 10 of its images look like patches to bundle"),
        ),
        ({"patches": 5, "scratches": 5}, Proposal("scratches", "German")),
        ({"dust": 9, "scratches": 1}, Proposal("scratches", "German")),
        ({}, Proposal("scratches", "German")),
    ],
)
def test_votes_support_what_the_name_says_or_contradict_it(
    votes: dict[str, int], expected: Proposal
) -> None:
    assert add_votes([Proposal("scratches", "German")], Counter(votes), NEU, "bundle") == expected


def test_votes_choose_among_several_classes_of_one_name() -> None:
    candidates = [Proposal("stain", "German"), Proposal("patches", "German")]
    votes = Counter({"patches": 6, "stain": 4})
    assert add_votes(candidates, votes, ["stain", "patches"], "b") == Proposal(
        "patches", "German; 6 of 10 of its images look like it to b"
    )


@pytest.mark.parametrize(
    ("votes", "proposed"),
    [({"patches": 6, "crazing": 4}, True), ({"patches": 5, "crazing": 5}, False)],
)
def test_without_a_known_name_most_images_must_look_like_one_class(
    votes: dict[str, int], proposed: bool
) -> None:
    expected = Proposal("patches", "6 of 10 of its images look like it to b") if proposed else None
    assert add_votes([], Counter(votes), NEU, "b") == expected


# What is refused


def test_the_error_names_all_unknown_folders_what_they_may_be_and_the_options_to_give() -> None:
    with pytest.raises(UsageError) as caught:
        class_names.check_class_folders(["Kratzer", "patches", "tiefe Narben", "xyz"], NEU)
    assert caught.value.what == (
        "'Kratzer', 'tiefe Narben', 'xyz' are none of the federation's classes, which are "
        f"{', '.join(NEU)}; Kratzer is perhaps scratches (German for it); tiefe Narben is "
        "perhaps pitted_surface (Narben is German for it)"
    )
    options = "--alias Kratzer=scratches --alias 'tiefe Narben=pitted_surface' --alias xyz=CLASS"
    assert options in caught.value.remedy


def test_folders_that_are_classes_are_accepted() -> None:
    class_names.check_class_folders(NEU[:3], NEU)


@pytest.mark.parametrize(
    ("alias", "why", "remedy"),
    [
        ({"Kratzr": "scratches"}, "no class folder is called 'Kratzr'", "did you mean 'Kratzer'?"),
        (
            {"Kratzer": "scratch"},
            "'scratch' is none of the federation's classes",
            "did you mean 'scratches'?",
        ),
    ],
)
def test_an_alias_of_no_folder_or_for_no_class_is_answered_with_the_nearest(
    alias: dict[str, str], why: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        class_names.check_own_aliases(alias, ["Kratzer", "patches"], NEU)
    assert remedy in caught.value.remedy
