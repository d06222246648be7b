"""Which verdicts are doubted, and why: against the thresholds and the reference that a bundle
brings.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker_config.protocol.errors import UsageError
from edge.bundle import bundle_format
from edge.bundle.bundle_format import BundleError
from edge.bundle.reference import ClassAxes, Reference, disagreement, load_reference, quantile
from edge.daemon.line_settings import parse
from edge.inference.served_model import load_model
from edge.inference.tiling import View
from edge.uncertainty.uncertainty_check import Settings, UncertaintyCheck
from tests.support.classified_images import (
    SIZE,
    STRIPES,
    Told,
    a_line,
    judged_bundle,
    picture,
    pictures,
    shown,
)
from tests.support.counted_calls import count_calls
from tests.support.tiny_bundle import tiny_bundle

RANDOM = np.random.default_rng(3)
SURE = picture(RANDOM, 0, noise=0)
UNSURE = picture(RANDOM, 0, strong=25, noise=0)
STRANGE = picture(RANDOM, 0, noise=0)  # red without doubt, but no red that was held out
STRANGE[..., 0], STRANGE[..., 1], STRANGE[..., 2] = (
    np.clip(STRIPES[..., 0] + each, 0, 255) for each in (250, 10, 130)
)
TORN = np.concatenate([picture(RANDOM, 0)[:, : SIZE // 2], picture(RANDOM, 2)[:, SIZE // 2 :]], 1)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judged_bundle(tmp_path_factory.mktemp("bundle") / "a")


def doubts(folder: Path, *images: np.ndarray, **settings: Any) -> list[tuple[str, ...]]:
    line = a_line(folder, Told(), UncertaintyCheck(Settings(**settings)))
    return [verdict.doubts for verdict in shown(line, images)]


def test_encoders_that_agree_do_not_disagree_and_those_that_name_different_classes_do_wholly():
    same, other = [0.7, 0.2, 0.1], [0.0, 0.0, 1.0]
    opinions = np.array([[same, same], [[1.0, 0, 0], other], [same, other]], np.float32)
    alike, apart, between = disagreement(opinions)
    assert alike == pytest.approx(0, abs=1e-6)
    assert apart == pytest.approx(1, abs=1e-6)
    # (H(mean) - mean H) / ln 2
    assert between == pytest.approx((0.9265 - 0.8018 / 2) / 0.6931, abs=1e-3)


def test_one_encoder_cannot_disagree():
    assert disagreement(np.ones((3, 1, 2), np.float32) / 2).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("images", "share", "rank"), [(99, 0.05, 95), (59, 0.05, 57), (10, 0.05, 10)]
)
def test_a_limit_is_passed_by_no_more_ordinary_images_than_the_share_or_is_the_largest_known(
    images, share, rank
):
    assert quantile(np.arange(1, images + 1, dtype=np.float32), 1 - share) == rank


def test_ordinary_images_are_doubted_about_as_rarely_as_was_asked(judged):
    found = doubts(judged, *pictures(600, 7), novelty=0.1, confidence=0.0)
    assert 0.03 < np.mean([bool(each) for each in found]) < 0.2
    assert set(sum(found, ())) == {"novelty"}


def test_each_image_is_doubted_for_what_is_wrong_with_it(judged):
    assert doubts(judged, SURE, STRANGE) == [(), ("novelty",)]
    assert "confidence" in doubts(judged, UNSURE)[0]
    assert "disagreement" in doubts(judged, TORN, disagreement=0.05)[0]


def test_the_encoders_disagreement_is_told_but_no_reason_to_doubt_unless_asked_for(judged):
    [verdict] = shown(a_line(judged, Told(), UncertaintyCheck(Settings())), [TORN])
    assert verdict.disagreement is not None
    assert verdict.disagreement > 0.3
    assert "disagreement" not in verdict.doubts


def test_settings_overrule_the_bundle(judged):
    assert "confidence" not in doubts(judged, UNSURE, confidence=0.0)[0]
    assert doubts(judged, SURE, confidence=1.0) == [("confidence",)]
    assert doubts(judged, STRANGE, novelty=0.0) == [()]


def test_a_frame_of_one_colour_is_doubted_by_every_bundle_unless_that_is_turned_off(
    judged, tmp_path
):
    tiny_bundle(tmp_path / "old")
    gray = np.full((SIZE, SIZE, 3), 130, np.uint8)
    assert doubts(tmp_path / "old", SURE, gray) == [(), ("blank",)]
    assert doubts(judged, gray)[0][0] == "blank"
    assert doubts(tmp_path / "old", gray, blank=False) == [()]


def test_a_frame_is_blank_only_if_all_of_its_tiles_are(tmp_path):
    tiny_bundle(tmp_path / "old")
    line = a_line(tmp_path / "old", Told(), UncertaintyCheck(Settings()))
    line.view = View(roi=(0, 0, 2 * SIZE, SIZE), tile=SIZE, overlap=0)
    gray = np.full((SIZE, 3 * SIZE, 3), 130, np.uint8)
    half, beside = gray.copy(), gray.copy()
    half[:, SIZE : 2 * SIZE] = beside[:, 2 * SIZE :] = SURE
    assert [each.doubts for each in shown(line, [gray, half, beside])] == [
        ("blank",),
        (),
        ("blank",),
    ]


def test_a_bundle_without_extras_gives_only_its_thresholds(tmp_path):
    confidence = bundle_format.Confidence(images=9, thresholds={"red": 0.9})
    tiny_bundle(tmp_path / "old", confidence=confidence)
    [verdict] = shown(
        a_line(tmp_path / "old", Told(), UncertaintyCheck(Settings(disagreement=0.1))), [UNSURE]
    )
    assert (verdict.doubts, verdict.disagreement, verdict.novelty) == (("confidence",), None, None)


def test_an_old_bundle_without_confidence_is_served_and_never_doubted(tmp_path):
    tiny_bundle(tmp_path / "old")
    assert doubts(tmp_path / "old", UNSURE, STRANGE) == [(), ()]


def test_the_next_model_is_measured_with_its_own_limits(judged, tmp_path):
    line = a_line(judged, Told(), UncertaintyCheck(Settings()))
    assert "confidence" in shown(line, [UNSURE])[0].doubts
    tiny_bundle(tmp_path / "b")
    line.model = load_model(tmp_path / "b")
    assert shown(line, [UNSURE])[0].doubts == ()


def test_a_tiled_frame_is_doubted_for_the_tile_that_decided(judged):
    seen: list[Any] = []
    line = a_line(judged, Told(), lambda each: seen.append(each) or each.verdict)
    shown(line, [SURE])
    outputs = line.model.predictor.run(np.stack([SURE, STRANGE]), ("opinions", "features"))
    judge = UncertaintyCheck(Settings())
    assert judge(seen[0]._replace(outputs=outputs, tile=0)).doubts == ()
    assert judge(seen[0]._replace(outputs=outputs, tile=1)).doubts == ("novelty",)


def test_a_reference_that_is_not_the_bundles_is_refused(judged, tmp_path):
    folder = judged_bundle(tmp_path / "b")
    file = folder / "reference.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(BundleError, match="hash differs"):
        load_model(folder)


AXES = ClassAxes(
    np.zeros(3, np.float32), np.eye(2, 3, dtype=np.float32), np.array([[0, 0, 0.6]], np.float32)
)
WITH_AXES = Reference.from_features(
    np.eye(4, dtype=np.float32) + 0.1, np.arange(4) % 3, 3, axes=AXES
)


def test_novelty_is_the_whitened_cosine_to_the_nearest_class_where_a_reference_has_axes():
    # features that are joined to them do not count
    across, along = np.array([[5, 5, 0, 9], [0, 3, 4, 0]], np.float32)
    assert AXES.distance(across) == pytest.approx(1 - np.sqrt(0.5))
    assert AXES.distance(along) == pytest.approx(1 - 3 / np.sqrt(9 + 0.64 * 16))
    # at right angles to one class, away from the other
    assert AXES.distance(-along) == pytest.approx(1)
    assert WITH_AXES.nearest_distance(along) == AXES.distance(along)


def test_a_reference_with_axes_holds_no_features_of_images_and_survives_its_file(tmp_path):
    tiny_bundle(tmp_path / "b", extras=True, reference=WITH_AXES.encode())
    found = load_reference(bundle_format.read_bundle(tmp_path / "b"))
    assert found is not None
    assert found.axes is not None
    assert found.features.shape == (0, 4)
    assert found.novelty.tolist() == sorted(AXES.distance(np.eye(4, dtype=np.float32) + 0.1))
    assert all(np.array_equal(*pair) for pair in zip(found.axes, AXES, strict=True))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        Reference.from_features(np.eye(4, 3), np.arange(4) % 2, 2).encode(),
        WITH_AXES._replace(axes=AXES._replace(within=np.zeros((1, 2), np.float32))).encode(),
        WITH_AXES._replace(axes=ClassAxes(np.zeros(9), np.eye(2, 9), np.eye(1, 9))).encode(),
        WITH_AXES.encode().replace(b"axes.within", b"axes.middle"),
        WITH_AXES.encode().replace(b"axes.within", b"axes.wither"),
    ],
)
def test_a_reference_that_cannot_be_used_is_said_to_be_damaged(tmp_path, content):
    tiny_bundle(tmp_path / "b", extras=True, reference=content)
    with pytest.raises(BundleError, match=r"reference\.safetensors is (damaged|of another model)"):
        load_reference(bundle_format.read_bundle(tmp_path / "b"))


def test_a_reference_survives_its_file(judged):
    found = load_reference(bundle_format.read_bundle(judged))
    assert found is not None
    fresh = Reference.from_features(
        *(np.random.default_rng(1).normal(size=(20, 4)), np.arange(20) % 2), 2
    )
    assert found.counts.sum() == 60
    assert found.freedom > 1
    assert len(fresh.encode()) > 0


def test_doubting_a_real_models_verdict_is_one_comparison_with_all_images_that_it_knows(judged):
    random = np.random.default_rng(0)
    model = load_model(judged)
    line = a_line(judged, Told())
    line.model = model
    caught: list[Any] = []
    line.monitors = (lambda seen: caught.append(seen) or seen.verdict,)
    calls = []
    for known in (16, 128):
        features = random.normal(size=(known, 1280)).astype(np.float32) ** 2
        votes = np.full((known, 2, 3), 1 / 3, np.float32)
        model.predictor.reference = Reference.from_features(
            features, np.arange(known) % 3, 3, votes
        )
        shown(line, [SURE])
        seen = caught[-1]._replace(outputs=caught[-1].outputs._replace(features=features[:1]))
        judge = UncertaintyCheck(Settings(disagreement=0.05))
        judge(seen)  # the limits of a model are found once
        calls.append(count_calls(lambda judge=judge, seen=seen: judge(seen)))
    assert calls[0] == calls[1]


def test_a_lines_settings_have_tables_for_doubt_drift_and_kept_images_beside_the_file():
    tables = {
        "doubt": {"novelty": 0.1},
        "drift": {"window": 50},
        "keep": {"path": "kept", "what": "all"},
    }
    found = parse(tables, Path("/etc/line.toml"))
    assert (found.doubt.novelty, found.drift.window) == (0.1, 50)
    assert found.keep is not None
    assert found.keep.path == "/etc/kept"
    with pytest.raises(UsageError, match="novelity"):
        parse({"doubt": {"novelity": 0.1}}, Path("/etc/line.toml"))
