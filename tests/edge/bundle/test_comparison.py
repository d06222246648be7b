"""What a plant reads about joining: figures, interval, choice, and warnings."""

import msgspec
import pytest

from edge.bundle.comparison import Candidate, CandidateName, Comparison


def candidate(accuracy: float, gain: tuple[float, float] = (0.0, 0.0)) -> Candidate:
    low, high = accuracy - 0.1, accuracy + 0.1
    return Candidate(accuracy=accuracy, low=low, high=high, gain_low=gain[0], gain_high=gain[1])


def comparison(deployed: CandidateName = "together", **changed: object) -> Comparison:
    fields = {
        "images": 60,
        "guessing": 0.25,
        "alone": candidate(0.61),
        "together": candidate(0.76, (0.1, 0.2)),
        "mixed": candidate(0.72, (0.04, 0.18)),
        "deployed": deployed,
    }
    return Comparison(**{**fields, **changed})


def test_a_plant_reads_what_joining_was_worth() -> None:
    assert comparison().describe() == (
        "on 60 held-out images: alone 61 %, together 76 % (10 to 20 points more than alone), "
        "mixed 72 %, guessing 25 %: together is deployed"
    )


def test_the_interval_belongs_to_what_is_deployed() -> None:
    assert (
        "mixed 72 % (4 to 18 points more than alone), guessing 25 %: mixed is deployed"
        in comparison("mixed").describe()
    )


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ((-0.2, -0.1), "10 to 20 points fewer than alone"),
        ((-0.02, 0.13), "from 2 points fewer than alone to 13 more"),
        ((0.0, 0.04), "0 to 4 points more than alone"),
    ],
)
def test_where_training_alone_is_deployed_the_interval_says_how_far_behind_the_others_are(
    gain: tuple[float, float], words: str
) -> None:
    described = comparison("alone", together=candidate(0.5, gain)).describe()
    assert f"together 50 % ({words})" in described
    assert described.endswith("alone is deployed")


def test_a_comparison_of_images_that_were_left_out_in_turn_says_so() -> None:
    assert "60 images, each left out in turn" in comparison(cross_validated=True).describe()
    assert "held-out" not in comparison(cross_validated=True).describe()


def test_a_plain_gain_needs_no_warning() -> None:
    assert comparison().warnings() == []


def test_a_model_that_may_be_guessing_is_warned_of() -> None:
    (warning,) = comparison(guessing=0.7).warnings()
    assert warning.startswith(
        "76 % of 60 images (66 % to 86 %) can hardly be told from guessing (70 %)"
    )
    assert comparison(guessing=0.65).warnings() == []


def test_accuracy_that_fell_during_training_is_warned_of() -> None:
    (warning,) = comparison(fall=(0.88, 0.76)).warnings()
    assert warning.startswith("accuracy fell during training, from 88 % to 76 %")


def test_a_judgement_by_a_few_images_is_warned_of() -> None:
    (warning,) = comparison(images=4).warnings()
    assert warning.startswith("only 4 images judged the model")
    assert comparison(images=10).warnings() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": -5},
        {"guessing": 1e308},
        {"deployed": "both"},
        {"fall": [0.5, 7.0]},
        {"alone": {"accuracy": 5, "low": 0, "high": 1}},
        {"mixed": {"accuracy": 0.5, "low": 0, "high": 1, "gain_low": -1e308}},
    ],
)
def test_figures_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    content = msgspec.to_builtins(comparison()) | wrong
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(content, Comparison)


def test_it_travels_in_a_manifest() -> None:
    assert msgspec.json.decode(msgspec.json.encode(comparison()), type=Comparison) == comparison()
